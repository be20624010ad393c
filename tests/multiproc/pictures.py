"""What of a tensordict has to arrive: bits and metadata as plain values, which compare and pickle."""

import torch

from tensordict.core.traverse import entries_with_path, nodes_with_path
from tensordict.distributed import composite


def bits(x):
    """The bytes of the elements, in row-major order."""
    x = x.detach().resolve_conj().resolve_neg()
    if not x.is_contiguous():
        x = x.contiguous()
    return x.reshape(-1).view(torch.uint8).tolist()


def _tensor(x, path):
    whole = composite.split(x, path)
    if whole is not None:
        kind, parts, params = whole
        return kind, [(p.dtype, list(p.shape), bits(p)) for p in parts], params, x.requires_grad
    formats = [
        x.dim() == n and not x.is_contiguous() and x.is_contiguous(memory_format=form)
        for n, form in ((4, torch.channels_last), (5, torch.channels_last_3d))
    ]
    return x.dtype, list(x.shape), bits(x), formats, x.requires_grad


def picture(node):
    """Everything that has to be equal."""
    out = {}
    for path, part in nodes_with_path(node):
        out[("node", *path)] = (part.kind, list(part.batch_size), part.names, part.is_locked)
    for path, entry in entries_with_path(node):
        if isinstance(entry, torch.Tensor):
            out[path] = _tensor(entry, path)
        elif hasattr(entry, "tolist"):
            out[path] = (type(entry).__name__, list(entry.batch_size), repr(entry.tolist()))
        else:  # a tensor that does not follow the batch
            out[path] = (type(entry).__name__, list(entry.batch_size), _tensor(entry.data, path))
    return out


def unlocked(shown):
    """The same tensordict with no node locked."""
    return {k: (*v[:3], False) if k[0] == "node" else v for k, v in shown.items()}


def differences(got, want):
    """The paths at which two pictures differ, with what each has there."""
    keys = [*want, *(k for k in got if k not in want)]
    return {k: (got.get(k), want.get(k)) for k in keys if got.get(k) != want.get(k)}
