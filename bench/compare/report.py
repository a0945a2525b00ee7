"""Records -> tables and a picture. Nothing here runs anything.

A file of records has one `run` record, and for every round and job a `case` record for each case
and a `job` record. The latest record of a round, job and case counts.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from html import escape

from measure import FIGURES, Case
from plan import ENGINES

TITLES = {"quire": "Quire", "vllm": "vLLM", "openvino": "OpenVINO", "llama.cpp": "llama.cpp",
          "transformers": "transformers"}
GROUP_TITLES = {"bf16": "bf16", "q8_0": "Q8_0, same file", "q4_1": "Q4_1, same file",
                "int8": "int8"}
# What bounds a figure: the shares of ceilings that are shown beside it.
BOUNDS = {"decode_tok_s": ("reading",), "ttft_ms": ("multiplying",),
          "prefill_tok_s": ("multiplying",), "out_tok_s": ("reading", "multiplying")}
BOUND_NAMES = {"reading": "read", "multiplying": "matrix"}
MODELS = {"135m": "SmolLM2-135M-Instruct", "1b": "the shape of Llama 3.2 1B, random weights"}


@dataclass
class Figure:
    """One figure of all engines: a row of a table.

    `values` is engine -> round -> value; `ceilings` has Quire's shares of ceilings, one for each
    round: bound -> percent.
    """

    group: str
    case: Case
    key: str
    title: str
    unit: str
    less_is_better: bool
    values: dict = field(default_factory=dict)
    ceilings: list = field(default_factory=list)

    def median(self, engine: str) -> float | None:
        values = self.values.get(engine)
        return statistics.median(values.values()) if values else None

    def best_peer(self) -> str | None:
        peers = [engine for engine in self.values if engine != "quire"]
        pick = min if self.less_is_better else max
        return pick(peers, key=self.median) if peers else None

    def ratio(self, peer: str) -> float | None:
        """How many times as good Quire is as `peer`: the median of the rounds that both have, each
        of them compared with itself, as the machine may change between rounds."""
        ours, theirs = self.values.get("quire", {}), self.values.get(peer, {})
        ratios = [ours[r] / theirs[r] for r in sorted(ours.keys() & theirs.keys())]
        if self.less_is_better:
            ratios = [1 / ratio for ratio in ratios]
        return statistics.median(ratios) if ratios else None


@dataclass
class Results:
    """What a file of records says."""

    run: dict
    figures: list
    jobs: dict  # (group, engine) -> job records
    errors: list  # (round, group, engine, case label, message)

    def engines(self, group: str) -> list[str]:
        """Engines of a group, those that failed included."""
        return [engine for engine in ENGINES if (group, engine) in self.jobs]

    def groups(self) -> list[str]:
        return [group for group in GROUP_TITLES if any(g == group for g, _ in self.jobs)]


def latest(records: list[dict]) -> list[dict]:
    """Records without those that a later one replaces."""
    kept = {}
    for record in records:
        key = (record["kind"], record.get("round"), record.get("job"), record.get("case"))
        kept.pop(key, None)
        kept[key] = record
    return list(kept.values())


def is_done(records: list[dict], round_number: int, job_name: str, cases: list[str]) -> bool:
    """Whether a job has a result without an error for each of its cases."""
    ours = [r for r in latest(records)
            if r.get("round") == round_number and r.get("job") == job_name]
    done = {r["case"] for r in ours if r["kind"] == "case" and "error" not in r}
    return done >= set(cases) and any(r["kind"] == "job" and "error" not in r for r in ours)


def collect(records: list[dict]) -> Results:
    records = latest(records)
    run = next(record for record in records if record["kind"] == "run")
    results = Results(run, [], {}, [])
    figures = {}
    for record in records:
        if record["kind"] == "job":
            key = (record["group"], record["engine"])
            results.jobs.setdefault(key, []).append(record)
        if record["kind"] != "case":
            continue
        case = Case.parse(record["case"])
        for key, title, unit, less in FIGURES[case.workload]:
            place = (record["group"], case.label, key)
            figure = figures.setdefault(
                place, Figure(record["group"], case, key, title, unit, less))
            if "error" not in record:
                figure.ceilings.append(record.get("ceiling") or {})
                values = figure.values.setdefault(record["engine"], {})
                values[record["round"]] = record["figures"][key]
        if "error" in record:
            results.errors.append((record["round"], record["group"], record["engine"], case.label,
                                   record["error"]))
    order = list(FIGURES)
    results.figures = sorted(figures.values(),
                             key=lambda figure: (order.index(figure.case.workload),
                                                 figure.case.cap))
    return results


# ---------------------------------------------------------------- markdown


def number(value: float) -> str:
    """Three digits or so."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def cell(figure: Figure, engine: str, failed: set) -> str:
    """`83.1 (80.2–84.0) · 1.98 ×`: median, least and most, and what Quire is times that."""
    value = figure.median(engine)
    if value is None:
        return "failed" if (figure.group, engine, figure.case.label) in failed else "–"
    values = figure.values[engine].values()
    text = number(value)
    if engine == figure.best_peer() and len(figure.values.keys() - {"quire"}) > 1:
        text = f"**{text}**"
    if len(values) > 1:
        text += f" ({number(min(values))}–{number(max(values))})"
    ratio = figure.ratio(engine) if engine != "quire" else None
    return f"{text} · {ratio:.2f} ×" if ratio else text


def ceiling_cell(figure: Figure) -> str:
    """`91 % read`: how close Quire came to what bounds the figure."""
    parts = []
    for bound in BOUNDS[figure.key]:
        percents = [ceiling[bound] for ceiling in figure.ceilings if bound in ceiling]
        if percents:
            parts.append(f"{statistics.median(percents):.0f} % {BOUND_NAMES[bound]}")
    return ", ".join(parts) or "–"


def group_table(results: Results, group: str) -> list[str]:
    engines = results.engines(group)
    failed = {(g, engine, label) for _, g, engine, label, _ in results.errors}
    figures = [figure for figure in results.figures if figure.group == group]
    with_ceilings = any(any(figure.ceilings) for figure in figures)
    heads = [GROUP_TITLES[group], *(TITLES[engine] for engine in engines), "Quire ÷ best peer"]
    if with_ceilings:
        heads.append("Quire, of the ceiling")
    lines = [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
    for figure in figures:
        best = figure.best_peer()
        ratio = figure.ratio(best) if best else None
        cells = [f"{row_title(figure)}, {figure.unit}",
                 *(cell(figure, engine, failed) for engine in engines),
                 f"**{ratio:.2f} ×**" if ratio else "–"]
        if with_ceilings:
            cells.append(ceiling_cell(figure))
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def row_title(figure: Figure) -> str:
    at_once = f", {figure.case.cap} at once" if figure.case.is_batch else ""
    return f"{figure.title}{at_once}"


def start_table(results: Results) -> list[str]:
    """What an engine loads, how long that takes, and its memory."""
    lines = ["| | weights | version | start to first token, s | peak resident, MB |",
             "| --- | --- | --- | --- | --- |"]
    for group in results.groups():
        for engine in results.engines(group):
            jobs = results.jobs[group, engine]
            starts = [job["first_token_s"] for job in jobs if "first_token_s" in job]
            peaks = [job["peak_rss"] for job in jobs if "peak_rss" in job]
            versions = [job["version"] for job in jobs if "version" in job]
            cells = [f"{GROUP_TITLES[group]}: {TITLES[engine]}", jobs[-1]["weights"],
                     versions[-1] if versions else "–",
                     number(statistics.median(starts)) if starts else "–",
                     f"{max(peaks) / 1e6:.0f}" if peaks else "–"]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def circumstances(results: Results) -> list[str]:
    """Machine, date, and how much others disturbed."""
    run = results.run
    machine, jobs = run["machine"], [job for jobs in results.jobs.values() for job in jobs]
    rounds = max((job["round"] for job in jobs), default=0)
    counted = f"{rounds} round{'s' if rounds != 1 else ''}"
    lines = [
        f"{MODELS[run['model']]}, on {machine['cpu']} ({machine['isa']}), {run['threads']} threads,"
        f" {machine['memory_gb']:.0f} GB, {machine['system']}. {run['date']}.",
        f"Medians of {counted} (least–most), the engines taking turns; n × says how many times as"
        " fast Quire is; **bold** is the best peer.",
    ]
    if jobs:
        shares = [100 * job["other_share"] for job in jobs]
        lines.append(f"Other processes took {statistics.median(shares):.0f} % of the cores "
                     f"({max(shares):.0f} % at worst); load average before a job "
                     f"{min(job['load_average'] for job in jobs):.1f} to "
                     f"{max(job['load_average'] for job in jobs):.1f}.")
    if run["ceiling"]:
        rates = {name: rate / 1e9 for name, rate in run["ceiling"].items() if rate is not None}
        lines.append(f"Ceilings of this machine at the start, by `quire bench ceiling`: "
                     f"{rates['read_huge_pages']:.1f} GB/s read from huge pages, "
                     f"{rates['read_small_pages']:.1f} from small ones; {rates['bf16']:.0f} GFLOP/s"
                     f" in bf16, {rates['int8']:.0f} GOP/s in int8.")
    return lines


def markdown(results: Results) -> str:
    parts = ["\n".join(circumstances(results))]
    parts += ["\n".join(group_table(results, group)) for group in results.groups()]
    parts.append("\n".join(start_table(results)))
    if results.errors:
        parts.append("Failed:\n\n" + "\n".join(
            f"- round {number_}, {group}, {TITLES[engine]}, {label}: {message}"
            for number_, group, engine, label, message in results.errors))
    return "\n\n".join(parts) + "\n"


# ---------------------------------------------------------------- picture

COLOURS = {"vllm": "#3b6ea8", "openvino": "#2f9e6f", "llama.cpp": "#d08a2e",
           "transformers": "#8a6bbf"}
LEFT, WIDTH, BAR, GAP, TOP = 330, 900, 13, 12, 58


def picture(results: Results) -> str:
    """SVG: for each figure a bar for every peer, as long as Quire is times as fast."""
    rows = [(figure, peer, figure.ratio(peer)) for group in results.groups()
            for figure in results.figures if figure.group == group
            for peer in results.engines(group) if peer != "quire"]
    rows = [row for row in rows if row[2]]
    scale = (WIDTH - LEFT - 60) / max([1.5, *(ratio for _, _, ratio in rows)])
    body, y, previous = [], TOP, None
    for figure, peer, ratio in rows:
        if figure is not previous:
            y += GAP
            body.append(label(LEFT - 10, y + BAR - 2, f"{figure.group}: {row_title(figure)}",
                              "end"))
            previous = figure
        body.append(f'<rect x="{LEFT}" y="{y}" width="{ratio * scale:.1f}" height="{BAR - 2}" '
                    f'fill="{COLOURS[peer]}"/>')
        body.append(label(LEFT + ratio * scale + 5, y + BAR - 3, f"{ratio:.2f}"))
        y += BAR
    height = y + GAP
    one = LEFT + scale
    frame = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="10" y="22" font-size="15">Quire: times as fast as …, '
        f'{escape(MODELS[results.run["model"]])}</text>',
    ]
    x = LEFT
    for peer in dict.fromkeys(peer for _, peer, _ in rows):
        frame.append(f'<rect x="{x}" y="36" width="11" height="11" fill="{COLOURS[peer]}"/>')
        frame.append(label(x + 16, 46, TITLES[peer]))
        x += 110
    line = (f'<line x1="{one:.1f}" y1="{TOP}" x2="{one:.1f}" y2="{height - 6}" stroke="#444" '
            f'stroke-dasharray="3 3"/>')
    return "\n".join([*frame, *body, line, "</svg>"]) + "\n"


def label(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
