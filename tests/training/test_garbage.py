"""Garbage is collected at steps that all ranks agree on."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from dist_mem.training.garbage import agree_on_collections


@contextmanager
def collected() -> Iterator[list[int]]:
    """Yield a list that gets a generation for every collection."""
    generations: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            generations.append(info["generation"])

    gc.callbacks.append(note)
    try:
        yield generations
    finally:
        gc.callbacks.remove(note)


def test_after_the_first_step_only_steps_collect_and_the_end_gives_all_back() -> None:
    num_frozen = gc.get_freeze_count()
    with collected() as generations, agree_on_collections(3) as after_step:
        counts = []
        for step in range(5, 13):
            _ = [[] for _ in range(10_000)]  # enough for an automatic collection
            generations.clear()
            after_step(step)
            _ = [[] for _ in range(10_000)]
            counts.append(len(generations))
        assert gc.get_freeze_count() > num_frozen
    assert counts == [1, 1, 0, 0, 1, 0, 0, 1], "the first of this start, then 6, 9 and 12"
    assert gc.isenabled() and gc.get_freeze_count() == 0


def test_without_a_number_of_steps_python_decides() -> None:
    num_frozen = gc.get_freeze_count()
    with agree_on_collections(None) as after_step:
        after_step(1)
        assert gc.isenabled() and gc.get_freeze_count() == num_frozen
