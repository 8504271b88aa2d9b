"""What the recorder knows by identity: it goes with its key, nothing is kept alive, and no cycle is left behind."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch

from tracefuse.recording.memories import Memories, WeakMap


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_a_value_goes_with_its_key(no_collection: None) -> None:
    known: WeakMap[str] = WeakMap()
    first, second = torch.ones(2), torch.ones(2)
    known[first], known[second] = "first", "second"
    known[first] = "again"
    assert (known.get(first), known.get(second), known.get(torch.ones(2))) == ("again", "second", None)
    del first
    assert known.values() == ["second"]


def test_a_tensor_whose_address_is_given_again_is_another_one() -> None:
    known: WeakMap[int] = WeakMap()
    for number in range(100):  # Python gives the address of what just went
        tensor = torch.ones(1)
        assert tensor not in known
        known[tensor] = number


def test_a_map_frees_its_values_without_a_collection_while_its_keys_live(no_collection: None) -> None:
    class Known:
        pass

    key, value = torch.ones(1), Known()
    seen = weakref.ref(value)
    known: WeakMap[Known] = WeakMap()
    known[key] = value
    del known, value
    assert seen() is None


def test_memory_has_one_number_while_anything_lies_in_it_and_never_another_ones() -> None:
    memories = Memories()
    tensor = torch.ones(4)
    number = memories.of(tensor)
    part = tensor[1:]
    del tensor
    assert memories.of(part) == memories.of(part.view(3, 1)) == number
    given = set()
    for _ in range(100):
        part.data = torch.ones(3)
        given.add(memories.of(part))
    assert len(given) == 100
    assert number not in given
    assert memories.of(torch.eye(2).to_sparse()) is None
