"""LoPA over processes (gloo) against one process: the same answers, and no more bytes than said."""

import json
import os
import random
import socket
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from dspec.decoding.diffusion import branch_parallel
from dspec.decoding.diffusion.block_state import Guess
from dspec.decoding.diffusion.branch_parallel import DistributedBranches, join_processes
from dspec.decoding.diffusion.row_state import BranchResult, SingleProcess
from dspec.decoding.generation import Request
from dspec.decoding.loop import decode
from dspec.decoding.sampling import GREEDY, Sampling
from dspec.errors import UserError
from eval import decoders

VOCAB = 11
CPU = torch.device("cpu")
WARM = Sampling(temperature=0.8, top_p=0.9)
FULL: dict[str, Any] = {"window_attention": "full", "cache": "committed"}
EXACT: dict[str, Any] = {"window_attention": "block_causal", "cache": "committed"}
COLLECTIVES = (
    "all_gather_into_tensor all_gather_single all_gather_coalesced all_gather_object all_reduce all_reduce_coalesced "
    "all_to_all all_to_all_single barrier batch_isend_irecv broadcast_object_list gather gather_object irecv isend "
    "monitored_barrier recv recv_object_list reduce reduce_scatter reduce_scatter_tensor scatter scatter_object_list "
    "send send_object_list"
).split()
PLAIN: dict[str, Any] = {"window_attention": "full", "cache": "none"}


def lopa(target: Any, executor: Any, **change: Any) -> Any:
    common: dict[str, Any] = {
        "block_size": 4, "append_ratio": 0.5, "activate_ratio": 0.7, "threshold": 0.6, "branches": 3,
        "branch_score": "mean", "segment": 1, "confidence_measure": "probability",
    }  # fmt: skip
    settings = common | change
    spec = decoders.lopa(label="LoPA", weights="trained", base=lambda: target, process_timeout_s=None, **settings)
    made: Any = spec.build(target=target, draft=None)
    made.executor = executor or SingleProcess()
    return made


def model(toys: SimpleNamespace, *, shift: bool = True, dtype: torch.dtype = torch.float32) -> Any:
    target = toys.target(seed=5, vocab=VOCAB, scale=0.4, dtype=dtype)
    target.model.config.dspec_logit_shift = shift
    return target


def some(count: int, limit: int = 17) -> list[Request]:
    rng = random.Random(1)
    return [
        Request(
            ids=[rng.randrange(VOCAB - 1) for _ in range(rng.randint(2, 6))],
            sampling=rng.choice([GREEDY, WARM]) if count > 1 else GREEDY,
            max_new_tokens=limit - i,
            stop_ids=(3,) if i % 2 else (),
            seed=i,
        )
        for i in range(count)
    ]


def trace(made: Any) -> list[Any]:
    return [[g.tokens, [[p.committed, p.filled, p.beyond, p.branches] for p in g.passes]] for g in made]


def processes(
    size: int,
    folder: Path,
    work: Callable[[DistributedBranches], Any],
    *,
    timeout: float = 30,
    until: int | None = None,
) -> tuple[list[Any], list[int | None]]:
    """What `work` returned in each of `size` forked processes, or its UserError; and their exit codes."""

    def child(rank: int) -> None:
        torch.set_num_threads(1)
        warnings.simplefilter("error", FutureWarning)  # of each rank, in each run
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size, timeout=timedelta(seconds=timeout)
        )
        try:
            result = work(DistributedBranches(CPU))
        except UserError as error:
            result = {"error": str(error)}
        (folder / f"{rank}.json").write_text(json.dumps(result))
        os._exit(0)  # not through what pytest does at exit

    started = [mp.get_context("fork").Process(target=child, args=(rank,)) for rank in range(size)]
    for one in started:
        one.start()
    deadline = time.monotonic() + 90
    for one in started[:until]:  # the others are stopped where they are
        one.join(max(0.0, deadline - time.monotonic()))
    codes = [one.exitcode for one in started]
    for one in started:
        one.kill()
    files = [folder / f"{rank}.json" for rank in range(size)]
    return [json.loads(file.read_text()) if file.is_file() else None for file in files], codes


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ranks_give_what_one_process_gives(
    toys: SimpleNamespace, tmp_path: Path, size: int, dtype: torch.dtype
) -> None:
    """More branches than ranks and fewer, both attentions, with and without a cache, rows that join and leave."""
    target, asked = model(toys, dtype=dtype), some(4)
    ways = [{**kind, "branches": k} for kind in (FULL, EXACT, PLAIN) for k in (0, 1, 2, 5)]

    def work(ranks: Any) -> list[Any]:
        return [trace(decode(lopa(target, ranks, **way), asked, in_flight=2)) for way in ways]

    results, codes = processes(size, tmp_path, work)
    assert codes == [0] * size
    expected = work(None)
    assert all(result == expected for result in results)
    assert len({json.dumps(one) for one in expected}) > 6
    assert max(p[3] for one in expected for _, passes in one for p in passes) == 6


def test_four_ranks_whose_caches_grow_at_other_times(
    toys: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their passes have other widths, so that what is committed may be past the end of one rank's buffer."""
    monkeypatch.setattr("dspec.models.cache._CHUNK", 8)
    target, asked = model(toys), some(2, 33)
    ways = [{**FULL, "branches": k} for k in (1, 2, 5)]

    def work(ranks: Any) -> list[Any]:
        return [trace(decode(lopa(target, ranks, **way), asked)) for way in ways]

    sizes: set[int] = set()

    def noted(ranks: Any) -> list[Any]:
        spread = ranks.sync_winners
        ranks.sync_winners = lambda w, rows, cache: sizes.add(cache.layers[0].keys.shape[2]) or spread(w, rows, cache)
        return [work(ranks), sorted(sizes)]

    results, codes = processes(4, tmp_path, noted)
    assert codes == [0] * 4
    expected = work(None)
    assert all(result == expected for result, _ in results)
    assert len({str(grown) for _, grown in results}) > 1
    assert all(len(grown) > 2 for _, grown in results)


def test_branches_are_divided_and_idle_ranks_compute_what_is_shared(toys: SimpleNamespace, tmp_path: Path) -> None:
    target, asked = model(toys), some(1)

    def work(ranks: Any) -> list[Any]:
        computed: list[tuple[int, list[int]]] = []
        divide = ranks.local_branches
        ranks.local_branches = lambda branches: computed.append((branches, list(divide(branches)))) or divide(branches)
        made = decode(lopa(target, ranks, **EXACT, branches=2), asked)
        return [computed, sum(p.positions for p in made[0].passes)]

    results, _ = processes(4, tmp_path, work)
    for rank, (computed, positions) in enumerate(results):
        for branches, local in computed:
            assert local == ([0] if branches == 1 else [rank] if rank < branches else [])
        assert positions <= results[0][1]
    assert any(not local for _, local in results[3][0])
    assert results[3][1] < results[0][1]


@pytest.mark.parametrize("kind", ["exact", "full", "plain"])
def test_bytes_of_a_round(toys: SimpleNamespace, tmp_path: Path, kind: str) -> None:
    """Counted where they are sent: one all-gather of packets per round, and, only where branches cache what differs,
    one broadcast of the keys and values of what was settled."""
    target, asked = model(toys, shift=kind == "full"), some(1, 33)
    config = target.model.config
    a_slot = target.num_layers * 2 * config.num_key_value_heads * (target.hidden_size // config.num_attention_heads) * 4

    def work(ranks: Any) -> list[Any]:
        sent: list[list[Any]] = []
        gather, broadcast = dist.all_gather, dist.broadcast

        def gathered(out: Any, packed: Any, **more: Any) -> Any:
            sent.append(["gather", packed.numel() * packed.element_size()])
            return gather(out, packed, **more)

        def spread(tensor: Any, **more: Any) -> Any:
            sent.append(["broadcast", tensor.numel() * tensor.element_size()])
            return broadcast(tensor, **more)

        for name in COLLECTIVES:  # whatever else is sent is counted, too
            setattr(dist, name, lambda *a, n=name, **more: sent.append([n, 0]))
        branch_parallel.dist.all_gather = gathered
        branch_parallel.dist.broadcast = spread
        slots: list[int] = []
        best = ranks.select_best
        ranks.select_best = lambda packets, most: slots.append(most) or best(packets, most)
        made = decode(lopa(target, ranks, **{"exact": EXACT, "full": FULL, "plain": PLAIN}[kind]), asked)
        return [sent, slots, made[0].nfe, len(asked[0].ids)]

    results, _ = processes(2, tmp_path, work)
    for sent, slots, nfe, _ in results:
        packets = [size for name, size in sent if name == "gather"]
        assert len(packets) == nfe
        assert packets == [16 + 12 * most for most in slots]
        assert {name for name, _ in sent} == ({"gather", "broadcast"} if kind == "full" else {"gather"})
    spread = [[size for name, size in sent if name == "broadcast"] for sent, *_ in results]
    assert spread[0] == spread[1]
    if kind != "full":
        assert spread[0] == []
        return
    last = target.hidden_size * 4
    assert {size - last for size in spread[0]} <= {a_slot * 4 * n for n in (1, 2, 3)}  # whole blocks, never the prompt
    assert sum(size - last for size in spread[0]) <= a_slot * 33


def _slow(ranks: Any, target: Any, what: Callable[[], None]) -> Any:
    """Decodes; the last rank does `what` in its third round."""
    rounds, best = [], ranks.select_best

    def counted(packets: Any, most: int) -> Any:
        rounds.append(most)
        if len(rounds) == 3 and ranks.rank == ranks.size - 1:
            what()
        return best(packets, most)

    ranks.select_best = counted
    return trace(decode(lopa(target, ranks, **FULL), some(1, 33)))


def test_a_dead_rank_ends_all(toys: SimpleNamespace, tmp_path: Path) -> None:
    target = model(toys)
    results, codes = processes(3, tmp_path, lambda ranks: _slow(ranks, target, lambda: os._exit(9)), timeout=5)
    assert codes == [0, 0, 9]
    assert [r["error"].split(":")[0] for r in results[:2]] == [
        f"rank {rank} of 3 cannot reach the others" for rank in (0, 1)
    ]


def test_a_rank_that_stalls_ends_all(toys: SimpleNamespace, tmp_path: Path) -> None:
    target = model(toys)
    results, codes = processes(
        2, tmp_path, lambda ranks: _slow(ranks, target, lambda: time.sleep(60)), timeout=1, until=1
    )
    assert codes[0] == 0
    assert "cannot reach the others" in results[0]["error"]


def test_packets(toys: SimpleNamespace) -> None:
    """What is sent is what was guessed: probabilities are float32 before."""
    third = torch.tensor(1 / 3).item()
    packet = BranchResult(1 / 3, 4, [Guess(7, third, -third), Guess(2**30, 1.0, 0.0)])
    data = branch_parallel._packed(packet, 5) + branch_parallel._packed(None, 5)
    assert len(data) == 2 * (16 + 5 * 12)
    assert branch_parallel._unpacked(data, 0) == packet
    assert branch_parallel._unpacked(data, len(data) // 2) is None


def test_of_equal_branches_the_lowest_number_wins() -> None:
    packets = [BranchResult(0.5, 2, []), BranchResult(0.7, 3, []), BranchResult(0.7, 1, [])]
    assert min(packets, key=lambda packet: packet.key).branch == 1
    assert SingleProcess().select_best([None, packets[0]], 1) == [packets[0]]


def test_a_rank_that_does_not_come_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torchrun = {"TORCHELASTIC_RUN_ID": "x", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": 0, "WORLD_SIZE": 2}
    for name, value in torchrun.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(UserError, match="not all processes have joined within process_timeout_s=1"):
        join_processes(timeout_seconds=1, device=CPU)


def test_joining_ranks(toys: SimpleNamespace, tmp_path: Path) -> None:
    """Those of an existing process group get a group of their own, with the timeout that was asked for; results say how
    many they are."""
    target = model(toys)
    with pytest.raises(UserError, match="torchrun"):
        join_processes(timeout_seconds=1, device=CPU)
    for wrong in (0, -1, float("nan"), float("inf")):
        with pytest.raises(UserError, match="process_timeout_s"):
            join_processes(timeout_seconds=wrong, device=CPU)

    def work(_: DistributedBranches) -> list[Any]:
        asked: list[Any] = []
        new_group = dist.new_group
        branch_parallel.dist.new_group = lambda **how: asked.append(how["timeout"].seconds) or new_group(**how)
        made = join_processes(timeout_seconds=7, device=CPU)
        packets = made.select_best([BranchResult(float(made.rank), made.rank, [])], 1)
        said = lopa(target, made, **FULL).settings(GREEDY)["processes"]
        return [made.group is not None, made.rank, made.size, packets[0].branch, asked, said]

    results, _ = processes(2, tmp_path, work)
    assert results == [[True, 0, 2, 1, [7], 2], [True, 1, 2, 1, [7], 2]]


def test_a_rank_that_dies_before_it_sends_its_winner(toys: SimpleNamespace, tmp_path: Path) -> None:
    """The broadcast of keys and values is waited for no longer, and ends in the same line, as the all-gather."""
    target = model(toys)

    def work(ranks: Any) -> Any:
        if ranks.rank:
            ranks._broadcast = lambda *what: os._exit(9)
        return trace(decode(lopa(target, ranks, **FULL), some(1, 33)))

    results, codes = processes(2, tmp_path, work, timeout=5)
    assert codes == [0, 9]
    assert "rank 0 of 2 cannot reach the others" in results[0]["error"]
