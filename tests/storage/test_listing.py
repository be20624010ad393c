"""Folders printed as trees."""

from __future__ import annotations

import pytest

from tensordict.utils import print_directory_tree


def test_a_tree_of_files(tmp_path, capsys):
    root = tmp_path / "root"
    (root / "sub" / "deep").mkdir(parents=True)
    (root / "b.bin").write_bytes(b"x" * 2048)
    (root / "a.txt").write_text("hi")
    (root / "sub" / "c.json").write_text("{}")
    print_directory_tree(root)
    assert capsys.readouterr().out == (
        "Directory size: 2.00 kB\nroot/\n    a.txt\n    b.bin\n    sub/\n        c.json\n        deep/\n"
    )
    print_directory_tree(root / "sub", indent="> ", display_metadata=False)
    assert capsys.readouterr().out == "> sub/\n>     c.json\n>     deep/\n"
    with pytest.raises(FileNotFoundError):
        print_directory_tree(tmp_path / "none")
