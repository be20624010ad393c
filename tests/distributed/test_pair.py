"""How two ranks find each other, without connections of gloo."""

import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from tensordict.distributed import pair
from tensordict.errors import PeerLost, TransferTimeout


class Gloo:
    """Stands in for the groups that are made: each is made of the names that the ends agreed on."""

    def __init__(self, monkeypatch):
        self.made = []
        self.fail = {}
        self._lock = threading.Lock()
        monkeypatch.setattr(dist, "ProcessGroupGloo", self._make)
        monkeypatch.setattr(pair.torch._C._distributed_c10d, "PrefixStore", lambda key, _: key)

    def _make(self, key, rank, size, timeout):
        assert size == 2 and timeout <= timedelta(seconds=pair._LONGEST_TRY)
        with self._lock:
            self.made.append((rank, key))
            left = self.fail.get(rank, 0)
            self.fail[rank] = left - 1
        if left > 0:
            raise RuntimeError("Gloo connectFullMesh failed with Connection closed by peer")
        return key


def connect(store, me, timeout, out):
    try:
        out[me] = pair.connect_pair(store, "key", me, 4 - me, timeout)
    except (PeerLost, TransferTimeout) as error:
        out[me] = error


def both(store, timeouts=(20, 20), pause=0.0):
    out = {}
    threads = [
        threading.Thread(target=connect, args=(store, me, timeout, out))
        for me, timeout in zip((1, 3), timeouts)
    ]
    threads[0].start()
    time.sleep(pause)
    threads[1].start()
    for thread in threads:
        thread.join()
    return out[1], out[3]


def test_both_ends_name_the_two_attempts_alike(monkeypatch):
    gloo = Gloo(monkeypatch)
    store = dist.HashStore()
    keys = set()
    for pause in (0.0, 0.05, 0.0):
        first, second = both(store, pause=pause)
        assert first == second and first not in keys
        keys.add(first)
    assert sorted(rank for rank, _ in gloo.made) == [0, 0, 0, 1, 1, 1]


def test_an_attempt_that_came_to_nothing_is_not_taken_for_the_next(monkeypatch):
    gloo = Gloo(monkeypatch)
    store = dist.HashStore()
    for me in (1, 3, 3, 1):  # never at one time
        out = {}
        connect(store, me, 0.02, out)
        assert isinstance(out[me], TransferTimeout) and "has not called it" in str(out[me])
    assert gloo.made == []
    first, second = both(store)
    assert first == second


def test_an_end_that_gave_up_while_connections_were_made_may_come_again(monkeypatch):
    gloo = Gloo(monkeypatch)
    gloo.fail = {0: 1, 1: 1}
    first, second = both(dist.HashStore())
    assert first == second and len(gloo.made) == 4
    gloo.fail = {0: 10**9, 1: 10**9}
    for error in both(dist.HashStore(), (0.05, 0.05)):
        assert isinstance(error, TransferTimeout)


def test_a_store_whose_keeper_is_gone():
    class Gone:
        def set(self, key, value):
            raise RuntimeError("Broken pipe\nframe #0")

    with pytest.raises(PeerLost, match=r"store of the process group is gone: Broken pipe$"):
        pair.connect_pair(Gone(), "key", 0, 1, 20)
