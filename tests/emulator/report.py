"""What a run tells: Report on success, Verdict on failure."""

from __future__ import annotations

import collections
import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Waiting:
    """Threads of one warp that stand at the same instruction and cannot go on.

    Attributes:
      cta: %ctaid; rank: %cluster_ctarank; warp: %warpid; lanes: mask.
      line, text: the instruction in the PTX; source: "file:line" of the kernel's source, or "".
      waits_for: what, in words.
      barrier: its state by name (address, parity, phase, pending, expected, tx_bytes; a named barrier: number, arrived,
        expected); empty for other waits.
    """

    cta: tuple[int, int, int]
    rank: int
    warp: int
    lanes: int
    line: int
    text: str
    source: str
    waits_for: str
    barrier: Mapping[str, int]


class Verdict(Exception):  # noqa: N818 - a verdict on the program, not an error of the emulator
    """The program under emulation is wrong.

    Attributes:
      fault: the kind of fault, a name of native/error.h ("deadlock", "out_of_bounds", ...).
      message: what happened, with values.
      line, text: the PTX line at fault (0 and "" if none).
      where: CTA, warp, lane, source line.
      waiting: for standstills, everything that waits.
    """

    def __init__(self, fault: str, message: str, line: int, text: str, where: str, waiting: tuple[Waiting, ...] = ()):
        self.fault, self.message, self.line, self.text, self.where, self.waiting = (
            fault,
            message,
            line,
            text.strip(),
            where,
            waiting,
        )
        lines = [f"{fault}: {message}"]
        if line:
            lines.append(f"  line {line}: {self.text}")
        if where:
            lines.append(f"  {where}")
        super().__init__("\n".join(lines))

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Verdict:
        """From the library's JSON."""
        waiting = tuple(
            Waiting(
                tuple(row["cta"]),
                row["rank"],
                row["warp"],
                row["lanes"],
                row["line"],
                row["text"],
                row["source"],
                row["waits_for"],
                row.get("barrier", {}),
            )
            for row in data["waiting"]
        )
        return Verdict(data["kind"], data["message"], data["line"], data["text"], data["where"], waiting)


_TRACE_KINDS = ("run", "wait", "copy", "tensor", "launch", "other")


@dataclasses.dataclass(frozen=True)
class TraceRow:
    """A stretch of one warp's run. Times count warp instructions of its cluster.

    Attributes:
      cluster, cta, warp: cluster in the grid, %cluster_ctarank, %warpid.
      begin, end: half open.
      line: the PTX line at which a run ended, that waits, or that issued the operation.
      kind: "run", "wait"; of an operation in flight, from its issue by this warp to its completion: "copy" (bulk and
        TMA), "tensor" (tcgen05, wgmma), "launch" (cluster launch control) or "other".
    """

    cluster: int
    cta: int
    warp: int
    begin: int
    end: int
    line: int
    kind: str


def _track(row: TraceRow) -> tuple[int, int, str]:
    return row.cta, row.warp, "" if row.kind in ("run", "wait") else row.kind


@dataclasses.dataclass(frozen=True)
class Report:
    """Counts of one launch, or of the launches of a plan.

    Attributes:
      entry: kernel names, joined by ", ".
      instructions: warp instructions executed.
      by_opcode, by_warp, by_line: the same by full mnemonic, by %warpid, by PTX line.
      mma: tensor-core operations by kind and shape.
      tma_bytes_in, tma_bytes_out: bytes that bulk copies brought to shared memory, and took from it.
      tmem_peak_columns: most Tensor Memory columns that one CTA had allocated.
      shared_bytes: of one CTA, static and dynamic.
      registers: of one thread at launch, as setmaxnreg counts; 0 where the compiler ignores setmaxnreg.
      barrier_waits, barrier_stalls: lanes that passed an mbarrier wait, and that were told to go on waiting.
      trace: rows of time per warp, if the launch asked for them.
      events: memory and synchronisation events by name, if the launch asked for them (native/events.h).
    """

    entry: str
    instructions: int
    by_opcode: Mapping[str, int]
    by_warp: tuple[int, ...]
    by_line: Mapping[int, int]
    mma: Mapping[str, int]
    tma_bytes_in: int
    tma_bytes_out: int
    tmem_peak_columns: int
    shared_bytes: int
    registers: int
    barrier_waits: int
    barrier_stalls: int
    trace: tuple[TraceRow, ...] = ()
    events: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Report:
        """From the library's JSON."""
        return Report(
            entry=data["entry"],
            instructions=data["instructions"],
            by_opcode=data["by_opcode"],
            by_warp=tuple(data["by_warp"]),
            by_line={int(line): count for line, count in data["lines"].items()},
            mma=data["mma"],
            tma_bytes_in=data["tma_bytes_in"],
            tma_bytes_out=data["tma_bytes_out"],
            tmem_peak_columns=data["peak_tensor_columns"],
            shared_bytes=data["shared_bytes"],
            registers=data["registers"],
            barrier_waits=data["barrier_waits"],
            barrier_stalls=data["barrier_stalls"],
            trace=tuple(TraceRow(a, b, c, d, e, f, _TRACE_KINDS[kind]) for a, b, c, d, e, f, kind in data["trace"]),
            events=data["events"],
        )

    @staticmethod
    def merge(reports: list[Report]) -> Report:
        """Sums of several launches, maxima of sizes. Lines and traces of different kernels are dropped."""
        if len(reports) == 1:
            return reports[0]
        by_opcode, mma = collections.Counter(), collections.Counter()
        for report in reports:
            by_opcode.update(report.by_opcode)
            mma.update(report.mma)
        warps = max((len(report.by_warp) for report in reports), default=0)
        padded = [report.by_warp + (0,) * (warps - len(report.by_warp)) for report in reports]

        def total(name: str) -> int:
            return sum(getattr(report, name) for report in reports)

        def largest(name: str) -> int:
            return max((getattr(report, name) for report in reports), default=0)

        return Report(
            entry=", ".join(report.entry for report in reports),
            instructions=total("instructions"),
            by_opcode=dict(by_opcode),
            by_warp=tuple(sum(column) for column in zip(*padded, strict=True)),
            by_line={},
            mma=dict(mma),
            tma_bytes_in=total("tma_bytes_in"),
            tma_bytes_out=total("tma_bytes_out"),
            tmem_peak_columns=largest("tmem_peak_columns"),
            shared_bytes=largest("shared_bytes"),
            registers=largest("registers"),
            barrier_waits=total("barrier_waits"),
            barrier_stalls=total("barrier_stalls"),
        )

    def table(self, count: int = 20) -> str:
        """The counts as text, with the `count` most frequent opcodes."""
        lines = [f"{self.entry}", f"{self.instructions:>14,} warp instructions"]
        lines += [f"{n:>14,} {name}" for name, n in sorted(self.by_opcode.items(), key=lambda item: -item[1])[:count]]
        lines += [f"{n:>14,} MMA {name}" for name, n in sorted(self.mma.items())]
        lines.append(f"{self.tma_bytes_in:>14,} bytes copied to shared memory, {self.tma_bytes_out:,} from it")
        lines.append(
            f"{self.tmem_peak_columns:>14,} Tensor Memory columns, {self.shared_bytes:,} bytes of shared memory"
        )
        lines.append(f"{self.barrier_waits:>14,} mbarrier waits passed, {self.barrier_stalls:,} stalled")
        return "\n".join(lines)

    def plot(self, path: str | pathlib.Path, cluster: int = 0) -> None:
        """Draws the trace of one cluster to an image file: rows of time per warp, coloured by PTX line; waits are grey.

        Raises:
          ValueError: the launch recorded no trace of that cluster.
        """
        rows = [row for row in self.trace if row.cluster == cluster]
        if not rows:
            raise ValueError(f'no trace of cluster {cluster}; launch with trace="role"')
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        # A row for each warp, and one for each kind of operation that it issues.
        tracks = sorted({_track(row) for row in rows})
        place = {track: i for i, track in enumerate(tracks)}
        lines = sorted({row.line for row in rows})
        colours = pyplot.get_cmap("turbo")
        figure, axes = pyplot.subplots(figsize=(14, 1 + 0.3 * len(tracks)), layout="constrained")
        for row in rows:
            colour = "0.85" if row.kind == "wait" else colours(lines.index(row.line) / max(len(lines) - 1, 1))
            height = 0.3 if row.kind == "wait" else 0.8
            bar = (place[_track(row)] - height / 2, height)
            axes.broken_barh([(row.begin, max(row.end - row.begin, 1))], bar, facecolor=colour)
        axes.set_yticks(range(len(tracks)), [f"CTA {cta} warp {warp} {kind}".rstrip() for cta, warp, kind in tracks])
        axes.invert_yaxis()
        axes.set_xlabel("warp instructions of the cluster")
        axes.set_title(self.entry[:80])
        figure.savefig(path, dpi=100)
        pyplot.close(figure)
