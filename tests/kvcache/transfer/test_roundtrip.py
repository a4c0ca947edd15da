"""Whatever a model's layout, what is stored comes back bit for bit, and nothing else changes."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtier.kvcache.transfer import TransferWorker, slot_layout, strided
from tests.kvcache.transfer.models import Model, contents, fill, models, requests, storages, touched

NUM_ROWS = 9
WORKERS = 2

# The device is the same for all examples.
ONE_DEVICE = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@pytest.fixture(autouse=True)
def every_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Move the limits between ways to copy to where each is taken by some of these small models."""
    monkeypatch.setattr(strided, "RUN_BYTES_MIN", 100)
    monkeypatch.setattr(strided, "MEMMOVE_BYTES_MIN", 64)
    monkeypatch.setattr(strided, "CALL_BYTES_MAX", 150)


@ONE_DEVICE
@given(model=models(), data=st.data())
def test_what_is_stored_is_loaded_bit_for_bit_and_nothing_else_changes(
    model: Model, data: st.DataObject, device: str
) -> None:
    layers, canonical = model.allocate(device)
    groups = data.draw(requests(model.config, model.blocks_per_chunk, NUM_ROWS))
    for seed, memory in enumerate(storages(layers).values()):
        fill(memory, seed)
    slot_bytes = slot_layout(canonical, model.blocks_per_chunk).slot_bytes
    rows = torch.empty((NUM_ROWS, WORKERS * slot_bytes + data.draw(st.sampled_from([0, 8, 64]))), dtype=torch.int8)
    fill(rows, 100)
    before, stored = rows.clone(), contents(model.config, model.axes, layers, groups)
    kept = {address: memory.clone() for address, memory in storages(layers).items()}
    with TransferWorker(
        canonical, rows[:, slot_bytes : 2 * slot_bytes], blocks_per_chunk=model.blocks_per_chunk
    ) as worker:
        worker.submit_store(1, groups)
        assert worker.wait([1])
        used = sorted(row for group in groups for row in group.rows)
        others = [row for row in range(NUM_ROWS) if row not in used]
        assert torch.equal(rows[:, :slot_bytes], before[:, :slot_bytes])
        assert torch.equal(rows[:, 2 * slot_bytes :], before[:, 2 * slot_bytes :])
        assert torch.equal(rows[others], before[others])
        for address, memory in storages(layers).items():
            assert torch.equal(memory, kept[address])

        for seed, memory in enumerate(storages(layers).values()):
            fill(memory, 200 + seed)
        cleared = {address: memory.cpu().clone() for address, memory in storages(layers).items()}
        worker.submit_load(2, groups)
        assert worker.wait([2])
    assert contents(model.config, model.axes, layers, groups) == stored
    masks = touched(model, layers, canonical, groups)
    for address, memory in storages(layers).items():
        untouched = ~masks[address]
        assert torch.equal(memory.cpu()[untouched], cleared[address][untouched])
    store, load = sorted(worker.poll())
    assert store.error is None
    assert load.error is None
    assert store.size_bytes == load.size_bytes
