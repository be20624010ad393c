"""Patterns, targets, specs and policies."""

import fnmatch
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tensordict.errors import CastError, EntryTypeError, FileFormatError
from tensordict.placement.names import parse_dtype
from tensordict.placement.policy import CastPolicy, PolicyMatcher
from tensordict.placement.rules import Rule, RuleSet, Spec, Target, compile_pattern, rules_of


@settings(max_examples=200, deadline=None)
@given(st.text("ab.*?[x]", max_size=8), st.text("ab.x", min_size=1, max_size=8))
def test_a_pattern_matches_as_fnmatch_does(pattern, path):
    expected = fnmatch.fnmatchcase(path, pattern)
    if pattern.startswith("*."):
        expected = expected or fnmatch.fnmatchcase(path, pattern[2:])
    assert bool(compile_pattern(pattern).match(path)) == expected


def test_case_does_not_matter_and_stars_cross_dots():
    assert Rule("*LayerNorm*").matches(("enc", "0", "layernorm", "weight"))
    assert Rule("enc*weight").matches(("enc", "0", "q", "weight"))
    assert not Rule("weight").matches(("enc", "weight"))


def test_a_tuple_is_one_exact_path():
    rule = Rule(("a", "b*"))
    assert rule.matches(("a", "b*")) and not rule.matches(("a", "bb"))


def test_the_last_match_wins_for_each_field():
    rules = RuleSet(rules_of([("*", torch.bfloat16), ("head.*", "cuda:1"), ("*.w", torch.float32)]))
    assert rules.target(("head", "w")) == Target("cuda:1", torch.float32)
    assert rules.target(("head", "b")) == Target("cuda:1", torch.bfloat16)
    assert rules.target(("x",)) == Target(dtype=torch.bfloat16)


def test_unmatched_rules_name_near_misses_and_optional_ones_are_silent():
    rules = RuleSet([*rules_of({"*.wieght": torch.int8}), Rule("*nothing*", optional=True)])
    paths = [("a", "weight"), ("a", "bias")]
    for path in paths:
        rules.target(path)
    (found,) = rules.unmatched(paths)
    assert found.pattern == "*.wieght" and found.near == ("a.weight",)
    assert "near: a.weight" in str(found)


def test_rules_and_specs_pickle():
    import pickle

    made = Spec({("a",): Target("cuda:1")}, rules_of({"*.b": torch.int8, ("x", "y"): "meta"}))
    again = pickle.loads(pickle.dumps(made))
    assert again == made and again.target(("q", "b")).dtype is torch.int8
    policy = CastPolicy.mixed()
    assert pickle.loads(pickle.dumps(policy)) == policy


def test_an_entry_beats_a_rule_and_a_rule_the_default():
    spec = Spec(
        {("a",): Target(dtype=torch.int8)},
        rules_of({"a": "meta", "b": torch.int16}),
        Target("cpu", torch.int32),
    )
    assert spec.target(("a",)) == Target("meta", torch.int8)
    assert spec.target(("b",)) == Target("cpu", torch.int16)
    assert spec.target(("c",)) == Target("cpu", torch.int32)


def test_a_spec_goes_through_json():
    spec = Spec(
        {
            ("a", "b.c"): Target(
                "cuda:1", torch.bfloat16, memory_format=torch.channels_last, pin=True
            )
        },
        (Rule("*x*", torch.float8_e5m2), Rule(("q", "*"), "meta", optional=True)),
        Target("cpu"),
    )
    assert Spec.from_json(json.loads(json.dumps(spec.to_json()))) == spec


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"format": "tensordict.spec", "version": 2},
        {
            "format": "tensordict.spec",
            "version": 1,
            "entries": [[["a"], {"evil": 1}]],
            "rules": [],
            "default": {},
        },
        {
            "format": "tensordict.spec",
            "version": 1,
            "entries": [],
            "rules": [],
            "default": {"memory_format": "x"},
        },
    ],
)
def test_json_that_is_no_spec_is_refused(data):
    with pytest.raises(FileFormatError):
        Spec.from_json(data)


def test_targets_are_normal_and_refuse_other_types():
    assert Target("cuda") == Target(torch.device("cuda:0"))
    assert Target.of("cpu:0") == Target("cpu")
    with pytest.raises(EntryTypeError, match="expected a dtype, a device or a Target"):
        Target.of(3.5)


def test_dtype_names():
    assert parse_dtype("BF16") is torch.bfloat16
    assert parse_dtype("torch.float8_e4m3fn") is torch.float8_e4m3fn
    with pytest.raises(CastError, match="float16"):
        parse_dtype("flaot16")
    with pytest.raises(CastError, match="names none"):
        parse_dtype("os.system")


def test_mixed_keeps_norms_embeddings_and_biases():
    policy = CastPolicy.mixed()
    kept = [
        "enc.norm1.weight",
        "h.0.ln_1.weight",
        "layer1.bn2.weight",
        "embed_tokens.weight",
        "wte.weight",
    ]
    kept += ["wpe.weight", "fc.bias", "bias", "LayerNorm.weight"]
    for name in kept:
        assert policy.dtype_for(tuple(name.split(".")), torch.float32) is torch.float32, name
    for name in ("fc.weight", "attn.q.weight"):
        assert policy.dtype_for(tuple(name.split(".")), torch.float32) is torch.bfloat16, name
    assert policy.dtype_for(("fc", "weight"), torch.int64) is None


def test_a_rule_of_none_keeps_a_leaf_as_it_is():
    policy = CastPolicy({"*.scale": None}, default="fp16")
    assert policy.dtype_for(("a", "scale"), torch.float64) is None
    assert policy.dtype_for(("a", "w"), torch.float64) is torch.float16


def test_integers_are_cast_when_asked():
    policy = CastPolicy(default=torch.int32, floating_only=False)
    assert policy.dtype_for(("a",), torch.int64) is torch.int32


def test_only_patterns_of_the_user_can_be_unmatched():
    matcher = PolicyMatcher(CastPolicy.mixed().keeping({"*.routr*": "fp32"}))
    matcher.dtype_for(("moe", "router", "w"), torch.float32)
    (found,) = matcher.unmatched([("moe", "router", "w")])
    assert found.pattern == "*.routr*"


def test_a_policy_goes_through_json():
    policy = CastPolicy(
        {"*.q": None, ("a", "b"): "fp32"},
        default="bf16",
        on_lossy="error",
        check="full",
        scale="tensor",
    )
    assert CastPolicy.from_json(json.loads(json.dumps(policy.to_json()))) == policy


@pytest.mark.parametrize("options", [{"on_lossy": "no"}, {"check": "some"}, {"scale": "row"}])
def test_options_of_a_policy_are_checked(options):
    with pytest.raises(EntryTypeError, match="expected one of"):
        CastPolicy(**options)
