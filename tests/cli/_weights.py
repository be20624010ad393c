"""Safetensors files for the command line, written byte by byte."""

from __future__ import annotations

import json

import pytest

from tensordict.cli.source import installed_model


def write_header(path, entries):
    """A file of tensors ``{name: (dtype, shape, nbytes)}``; its data is a hole."""
    header, at = {}, 0
    for name, (dtype, shape, nbytes) in entries.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    with open(path, "r+b") as file:
        file.truncate(8 + len(text) + at)
    return path


def small_file(path):
    return write_header(
        path,
        {
            "layer.0.weight": ("F32", [8, 4], 128),
            "layer.0.bias": ("F32", [8], 32),
            "norm.weight": ("F32", [8], 32),
            "ids": ("I64", [4], 32),
        },
    )


def real_file():
    path = installed_model()
    if path is None:
        pytest.skip("the model of the extra 'demo' is not installed")
    return path
