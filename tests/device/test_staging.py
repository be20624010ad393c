"""The pool of staging buffers: bounded, reused, never handed out too early."""

import threading

import pytest
import torch

from tensordict.device.fake import FakeDevices
from tensordict.device.staging import StagingPool
from tensordict.device.sync import Barrier
from tensordict.errors import StagingExhausted

CUDA = torch.device("cuda:0")


def test_a_buffer_is_used_again():
    pool = StagingPool(1 << 20, pin=False)
    pointers = set()
    for _ in range(5):
        with pool.take(5000) as block:
            assert block.data.dtype is torch.uint8 and block.data.shape[0] >= 5000
            pointers.add(block.data.data_ptr())
    stats = pool.stats()
    assert len(pointers) == 1
    assert (stats.n_allocated, stats.n_reused, stats.used_nbytes) == (1, 4, 0)


def test_the_pool_never_owns_more_than_it_may():
    pool = StagingPool(4096, pin=False)
    a = pool.take(2048)
    b = pool.take(2000)
    with pytest.raises(StagingExhausted, match="4096 bytes and 4096"):
        pool.take(1)
    a.release()
    b.release()
    big = pool.take(4000)
    assert pool.stats().held_nbytes == 4096
    big.release()
    with pytest.raises(StagingExhausted):
        pool.take(4097)


def test_pinning_happens_once_per_buffer():
    with FakeDevices() as world:
        pool = StagingPool(1 << 16, device="cuda")
        for _ in range(3):
            with pool.take(100) as block:
                assert world.is_pinned(block.data)
        assert world.n_pins == 1


def test_a_buffer_that_a_copy_still_reads_is_not_handed_out():
    with FakeDevices() as world:
        pool = StagingPool(1 << 16, device="cuda")
        block = pool.take(256)
        block.data[:4] = 1
        out = block.data[:4].to(CUDA, non_blocking=True)
        block.release(Barrier([CUDA]))
        other = pool.take(256)
        assert other is not block
        other.data[:4] = 9
        world.run_all()
        assert out.to("cpu").tolist() == [1, 1, 1, 1]


def test_a_full_pool_waits_for_the_oldest_copy():
    with FakeDevices() as world:
        pool = StagingPool(256, device="cuda")
        block = pool.take(256)
        block.data[:2] = 3
        out = block.data[:2].to(CUDA, non_blocking=True)
        block.release(Barrier([CUDA]))
        again = pool.take(256)
        assert again is block and world.waits == [CUDA]
        again.data[:2] = 4
        assert out.to("cpu").tolist() == [3, 3]
        assert pool.stats().n_waits == 1


def test_trim_drops_idle_buffers_alone():
    pool = StagingPool(1 << 20, pin=False)
    held = pool.take(1024)
    pool.take(4096).release()
    assert pool.trim() == 4096
    assert pool.stats().held_nbytes == 1024
    held.release()
    held.release()
    assert pool.stats().used_nbytes == 0


def test_threads_never_share_a_buffer():
    pool = StagingPool(1 << 20, pin=False)
    wrong = []

    def work(mark):
        for _ in range(200):
            with pool.take(300) as block:
                block.data.fill_(mark)
                if not bool((block.data == mark).all()):
                    wrong.append(mark)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert pool.stats().used_nbytes == 0


@pytest.mark.parametrize("options", [{"max_bytes": 0}, {"max_bytes": 10, "alignment": 0}])
def test_sizes_must_be_positive(options):
    with pytest.raises(ValueError, match="positive"):
        StagingPool(**options)
