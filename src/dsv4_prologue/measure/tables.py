"""What the records and the cards say, as tables in Markdown.

Only the newest record of each thing is shown. A row whose kernel, launch or (of a proof) card file
is no longer today's is marked stale. A figure that somebody else reported is labelled so.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from dsv4_prologue.cards import Card
from dsv4_prologue.measure.evidence import Against, Evidence, Place, Record, Row
from dsv4_prologue.measure.reported import LABEL, REPORTED
from dsv4_prologue.planning import DEFAULT_LAUNCH, Plan, Problem, plan
from dsv4_prologue.verify.compilers import STAND_INS

NOTHING = "No record yet."
#: What stands for the best bare copy among the baselines.
LIMIT = "the limit (a bare copy)"


# ----------------------------------------------------------------------------------- Markdown


def table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table. A header that begins with ">" is of numbers; a column without a cell is left out."""
    body = list(rows)
    kept = [i for i in range(len(headers)) if any(row[i] for row in body)]
    lines = [
        [headers[i].removeprefix(">") for i in kept],
        ["--:" if headers[i].startswith(">") else "---" for i in kept],
        *([row[i].replace("|", "\\|").replace("\n", " ") for i in kept] for row in body),
    ]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def bullets(lines: Iterable[str]) -> str:
    """A list, each line once."""
    return "\n".join(f"- {line}" for line in dict.fromkeys(lines))


def paragraphs(*parts: str) -> str:
    """Parts with an empty line between them; empty parts are left out."""
    return "\n\n".join(part for part in parts if part)


def _figure(value: float | None) -> str:
    """A time or a bandwidth: three figures, or all before the point."""
    if value is None:
        return ""
    return f"{value:.{max(0, 2 - int(math.log10(max(value, 1))))}f}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"


def _times(ratio: float) -> str:
    """A ratio; near 1 with a third place."""
    return f"{ratio:.{3 if 0.9 < ratio < 1.1 else 2}f}x"


def size(shape: tuple[int, int]) -> str:
    """Tokens x heads."""
    return f"{shape[0]} x {shape[1]}"


def _marked(text: str, stale: str) -> str:
    """The text, marked if what it heads is stale, and why."""
    return f"{text} (stale: {stale})" if stale else text


def _run(record: Record) -> str:
    """When a record was made, of which commit, on what, by which command."""
    run = record["run"]
    seen = run["environment"]
    versions = [f"{name} {seen[name]}" for name in ("driver", "torch", "triton") if seen.get(name)]
    commit = f"commit {run['commit'][:10]}{' and changes' * run['dirty']}"
    commit += " (entered by hand)" * ("stamped" in run)
    return ", ".join([run["date"][:10], commit, seen["device"], *versions, f"`{run['command']}`"])


# ------------------------------------------------------------------------------------- proofs

#: The columns of proofs, and how the names of those begin that stand in them.
_COLUMNS = {
    "bytes": r"numerics",
    "memory": r"memory",
    "any order": r"order",
    "launches": r"launches|grids",
    "compiler": r"compiler|cast|target|Ascend's",
    "lanes": r"\d+ lanes",
    "other": r"",
}


def _proof_cell(proofs: Sequence[Record]) -> str:
    """The verdicts of the proofs in one cell, and which targets or lanes they speak of."""
    cells = []
    for verdict in ("refused", "proved", "not provable here"):
        found = [one for one in proofs if one["verdict"] == verdict]
        names = []
        for one in found:
            name = one["proof"].removeprefix("compiler ")
            if name != one["proof"]:
                names.append(f"{name} in its stead" if one["card"] in STAND_INS else name)
            elif re.match(_COLUMNS["lanes"], name):
                names.append(name)
        text = f"{verdict} ({', '.join(names)})" if names else verdict
        if found:
            cells.append(f"**{text}**" if verdict == "refused" else text)
    return "; ".join(cells)


def verify(evidence: Evidence) -> str:
    """A row a card, a column a kind of proof; below, why what is not proved is not."""
    cards = sorted(evidence.proofs().items())
    rows, reasons = [], []
    for card, proofs in cards:
        cells: dict[str, list[Record]] = {column: [] for column in _COLUMNS}
        for one in proofs:
            column = next(name for name, how in _COLUMNS.items() if re.match(how, one["proof"]))
            cells[column].append(one)
            if one["verdict"] != "proved":
                reasons.append(f"{card}, {one['proof']}: {one['verdict']}: {one['reason']}")
        stale = next(filter(None, map(evidence.stale, proofs)), "")
        rows.append([_marked(card, stale), *map(_proof_cell, cells.values())])
    runs = [f"Of {_run(proofs[0])}." for _, proofs in cards]
    text = paragraphs(table(["card", *_COLUMNS], rows), bullets([*reasons, *runs]))
    return text if rows else NOTHING


def verify_card(evidence: Evidence, card: Card) -> str:
    """Every proof of a card, with its reason."""
    proofs = evidence.proofs().get(card.name, [])
    if not proofs:
        return NOTHING
    rows = [
        [_marked(one["proof"], evidence.stale(one)), one["verdict"], one["reason"]]
        for one in proofs
    ]
    return paragraphs(table(["proof", "verdict", "why"], rows), f"Of {_run(proofs[0])}.")


# ------------------------------------------------------------------------------------- checks


def _check_row(name: str, place: Place, checks: Sequence[Record], newest: Record) -> list[str]:
    """Verdicts counted, what differed in all that ran, and the run of the newest record."""
    counts = Counter(one["verdict"] for one in checks)
    ran = [one for one in checks if "max_ulp" in one]
    return [
        name,
        place.device,
        *(str(counts[verdict]) for verdict in ("ok", "differs", "not verified")),
        str(sum(one["bytes_differing"] for one in ran)) if ran else "",
        str(max(one["max_ulp"] for one in ran)) if ran else "",
        f"{newest['run']['date'][:10]}, {newest['run']['commit'][:10]}",
    ]


def check(evidence: Evidence, card: Card | None = None) -> str:
    """A row a card and device: how many cases agree with the oracle, and how nearly."""
    rows, reasons = [], []
    for place, cases in sorted(evidence.checks().items()):
        if card is not None and card.name != place.card:
            continue
        newest = max(cases, key=lambda one: str(one["run"]["date"]))
        name = _marked(place.card + " (named)" * place.forced, evidence.stale(newest))
        rows.append(_check_row(name, place, cases, newest))
        reasons += [
            f"{place.card} on {place.device}, {size((one['num_tokens'], one['num_heads']))}, "
            f"{one['variant']}: **differs**: {one['reason']}"
            for one in cases
            if one["verdict"] == "differs"
        ]
    rows += _checked_before_timing(evidence, card)
    headers = ["card", "ran on", ">ok", ">differ", ">not verified", ">cache bytes that differ"]
    headers += [">worst ULP of Q", "day, commit"]
    allowed = (
        "A byte may differ where KV is normalised first, two in 10000 at most: a sum in another "
        "order may round an element the other way. Nowhere else."
    )
    return paragraphs(table(headers, rows), allowed, bullets(reasons)) if rows else NOTHING


def _checked_before_timing(evidence: Evidence, card: Card | None) -> Iterator[list[str]]:
    """A row a place: the calls of today's kernel that a benchmark compared with the oracle."""
    for place, records in sorted(evidence.benches().items()):
        today = {
            (one["num_tokens"], one["num_heads"], one["form"]): one
            for one in records
            if one["candidate"] == "ours" and not evidence.stale(one)
        }
        if not today or (card is not None and card.name != place.card):
            continue
        newest = max(today.values(), key=lambda one: str(one["run"]["date"]))
        name = place.card + " (named)" * place.forced + ", calls that `bench` timed"
        yield _check_row(name, place, [one["check"] for one in today.values()], newest)


# --------------------------------------------------------------------------------- benchmarks


def _against_cell(against: Against | None, ours_us: float | None) -> str:
    """Their time, the ratio and the verdict; a loss stands out.

    `ours_us` is our time in the row; where it was another one beside this baseline, that is told.
    """
    if against is None:
        return ""
    figures = [f"{_figure(against.time_us)} us"] if against.time_us is not None else []
    if math.isfinite(against.ratio):
        figures.append(f"{_times(against.ratio)} {against.verdict}")
    else:
        figures.append(against.verdict)
    if against.ours_us is not None and _figure(against.ours_us) != _figure(ours_us):
        figures.append(f"ours {_figure(against.ours_us)} us beside it")
    text = ", ".join(figures)
    return f"**{text}**" if against.verdict == "slower" else text


def _mode_table(rows: Sequence[Row]) -> str:
    """A row a shape: ours, and each baseline's time, ratio and verdict."""
    names = list(dict.fromkeys(name for row in rows for name in row.against))
    headers = ["tokens x heads", ">us", ">spread", ">GB/s", ">of the ceiling"]
    headers += [">limit ratio", ">of a layer"]
    lines = []
    for row in rows:
        ours = row.ours
        limit = ours.get("limit_ratio")
        timed = "median_us" in ours
        figures = [
            _figure(ours["median_us"]) if timed else f"not timed: {ours['reason']}",
            _percent(ours["spread"]) if timed else "",
            _figure(ours.get("gbps")),
            _percent(ours.get("utilisation")),
            f"{limit:.3f}" if limit is not None else "",
            _percent(ours.get("share")),
        ]
        against = (_against_cell(row.against.get(name), ours.get("median_us")) for name in names)
        lines.append([_marked(size(row.shape), row.stale), *figures, *against])
    return table([*headers, *names], lines)


def _provenance(name: str, told: Record) -> str:
    """A baseline's package, files and launch, in words."""
    parts = [" ".join(str(told[key]) for key in ("package", "version") if key in told)]
    files = [file for file in (told, *told.get("files", ())) if "sha256" in file]
    parts += [f"{file['file']} (sha256 {file['sha256'][:12]})" for file in files]
    parts += [str(told[key]) for key in ("what", "schema", "launch") if key in told]
    parts += [f"patched: {patch}" for patch in told.get("patches", ())]
    return f"{name}: {'; '.join(part for part in parts if part)}"


def _notes(records: Sequence[Record]) -> Iterator[str]:
    """What stands behind a place's tables: runs, ceilings, baselines, and what was left out."""
    shapes: defaultdict[str, set[tuple[int, int]]] = defaultdict(set)
    remarks: defaultdict[tuple[str, str], set[tuple[int, int]]] = defaultdict(set)
    for one in records:
        mode, shape = one["mode"], (one["num_tokens"], one["num_heads"])
        shapes[mode].add(shape)
        before, after = one["ceilings"]["before"], one["ceilings"]["after"]
        ended = f"{after['gbps']:.0f} GB/s after" if after else "the run was broken off"
        yield (
            f"Of {_run(one)}; host {one['run']['environment'].get('host_cpu', 'not known')}. "
            f"Ceiling {before['gbps']:.0f} GB/s before ({before['best']}; "
            f"{before['idle_gbps']:.0f} before the clocks rose), {ended}."
        )
        if one["ceilings"]["mark"]:
            yield f"Marked: {one['ceilings']['mark']}."
        yield from (f"**Device: {fault}**" for fault in one["device_faults"]["after"] or ())
        if "provenance" in one:
            yield _provenance(one["candidate"], one["provenance"])
        for name, reason in one.get("left_out", {}).items():
            remarks[mode, f"{name} is left out: {reason}"].add(shape)
        for fault in one["faults"]:
            remarks[mode, f"{one['candidate']} is marked: {fault.partition(':')[0]}"].add(shape)
        if one.get("late") and one["late"] == one["rounds"]:
            late = "late: each sample waited for the host, and holds what that takes"
            remarks[mode, f"{one['candidate']} is marked: {late}"].add(shape)
    for (mode, text), found in remarks.items():
        where = "" if found == shapes[mode] else f" ({', '.join(map(size, sorted(found)))})"
        yield f"{mode}: {text}{where}"


def _by_form(rows: Sequence[Row]) -> dict[str, list[Row]]:
    forms: dict[str, list[Row]] = {}
    for row in rows:
        forms.setdefault(row.ours["form"], []).append(row)
    return forms


def _place_text(evidence: Evidence, place: Place) -> str:
    """The tables of one card on one device."""
    modes = evidence.rows(place)
    parts = [f"**{place.device}{', the card named' * place.forced}**"]
    for mode, rows in modes.items():
        for form, of_form in _by_form(rows).items():
            parts.append(f"{mode.capitalize()}, Q {form}:")
            parts.append(_mode_table(of_form))
    parts.append(_parts_tables(evidence, place))
    shown = {id(row.ours["run"]) for rows in modes.values() for row in rows}
    records = [one for one in evidence.benches()[place] if id(one["run"]) in shown]
    return paragraphs(*parts, bullets(_notes(records)))


def _parts_tables(evidence: Evidence, place: Place) -> str:
    """What each part of our call takes, a row a shape and mode; empty where none was timed."""
    found = evidence.parts(place)
    host = {key: of_shape for key, of_shape in found.items() if key[0] == "host"}
    device = {key: of_shape for key, of_shape in found.items() if key[0] != "host"}
    return paragraphs(
        _parts_table("Parts of the call by themselves, Q in place, us:", device, evidence),
        _parts_table("What the host does in a call that repeats one, us:", host, evidence),
    )


def _parts_table(
    title: str, found: Mapping[tuple[str, int, int], Sequence[Record]], evidence: Evidence
) -> str:
    names = list(dict.fromkeys(one["form"] for of_shape in found.values() for one in of_shape))
    rows = []
    for (mode, num_heads, num_tokens), of_shape in found.items():
        times = {one["form"]: _figure(one["median_us"]) for one in of_shape}
        heading = _marked(size((num_tokens, num_heads)), evidence.stale(of_shape[0]))
        rows.append([heading, mode, *(times.get(name, "") for name in names)])
    headers = ["tokens x heads", "mode", *(f">{name}" for name in names)]
    return paragraphs(title, table(headers, rows)) if rows else ""


def _reported(card: Card) -> str:
    """What others reported of a card."""
    rows = [
        [
            size((one.num_tokens, one.num_heads)),
            f"{one.plain_gbps:.0f}" if one.plain_gbps is not None else "could not be built",
            f"{one.gbps:.0f}",
            f"{_percent(one.utilisation)} of {one.ceiling_gbps:.0f}",
        ]
        for one in REPORTED
        if one.card == card.name
    ]
    headers = ["tokens x heads", ">plain form, GB/s", ">this launch, GB/s", ">of the ceiling"]
    said = f"{LABEL.capitalize()}: of an earlier kernel with this tile and cast, not of ours."
    return paragraphs(said, table(headers, rows)) if rows else ""


def bench(evidence: Evidence, card: Card) -> str:
    """Every shape of a card, and what others reported of it."""
    places = [place for place in sorted(evidence.benches()) if place.card == card.name]
    parts = [_place_text(evidence, place) for place in places] or [NOTHING]
    return paragraphs(*parts, _reported(card))


def _summary(name: str, ratios: Sequence[tuple[float, Row]]) -> list[str]:
    """How many cases, the geometric mean, the worst, and where that is."""
    worst, where = min(ratios, key=lambda one: one[0])
    mean = math.exp(math.fsum(math.log(ratio) for ratio, _ in ratios) / len(ratios))
    forms = dict.fromkeys(row.ours["form"] for _, row in ratios)
    at = f"{size(where.shape)}, {where.ours['form']}"
    return [f"{name}, Q {' or '.join(forms)}", str(len(ratios)), _times(mean), _times(worst), at]


def _summaries(rows: Sequence[Row]) -> Iterator[list[str]]:
    """A line a baseline, and one for the limit."""
    for name in dict.fromkeys(name for row in rows for name in row.against):
        pairs = [(row.against[name], row) for row in rows if name in row.against]
        ratios = [(one.ratio, row) for one, row in pairs if math.isfinite(one.ratio)]
        counts = Counter(one.verdict for one, _ in pairs)
        told = [f"{counts[v]} {v}" for v in ("faster", "same", "unclear") if counts[v]]
        told += [f"**{counts['slower']} slower**"] if counts["slower"] else []
        apart = [abs(one.ratio / one.before - 1) for one, _ in pairs if one.before is not None]
        again = _percent(max(apart)) if apart else ""
        if ratios:
            yield [*_summary(name, ratios), ", ".join(told), again]
    limits = [(row.ours["limit_ratio"], row) for row in rows if "limit_ratio" in row.ours]
    if limits:
        yield [*_summary(LIMIT, limits), "", ""]


def bench_summary(evidence: Evidence) -> str:
    """By card, a row a mode and baseline: the mean ratio, the worst one and where, verdicts.

    What is stale is apart from what is not.
    """
    headers = ["mode", "against", ">cases", ">geometric mean", ">worst", "at", "verdicts"]
    parts = []
    for place in sorted(evidence.benches()):
        lines = []
        for mode, rows in ({} if place.forced else evidence.rows(place)).items():
            for stale in sorted({row.stale for row in rows}):  # today's first
                alike = [row for row in rows if row.stale == stale]
                # What the host pays differs from form to form, and so do the rivals.
                groups = _by_form(alike).values() if mode == "host" else [alike]
                name = _marked(mode, stale)
                lines += [[name, *cells] for group in groups for cells in _summaries(group)]
        if lines:
            parts.append(f"**{place.card}, {place.device}**")
            parts.append(table([*headers, ">run to run"], lines))
    return paragraphs(*parts) or NOTHING


# -------------------------------------------------------------------------------------- plans


def _facts(card: Card) -> Iterator[str]:
    """What a card's file says beside its launches."""
    if card.match is not None:
        backends = " or ".join(f"`{one}`" for one in card.match.backends)
        arches = ", ".join(f"`{one}`" for one in card.match.arches) or "any arch"
        name = f", and a device name in which `{card.match.device_name}` is found"
        named = name if card.match.device_name else ""
        yield f"Recognised by Triton's target: {backends} with {arches}{named}."
    if card.kernel != "torch":
        lanes = f", {card.lanes} lanes a warp" if card.lanes else ""
        casts = {"compiler": "the compiler's own cast", "integer": "integer arithmetic"}
        yield f"Kernel `{card.kernel}`{lanes}; to E4M3 by {casts[card.fp8_cast]}."
    if card.toolchain is not None:
        yield f"The rules need {card.toolchain}: {card.toolchain.why}."
    if card.limits is not None:
        yield (
            f"A launch has at most {card.limits.max_programs} programs and a multiple of "
            f"{card.limits.multiple_of}, so {card.limits.chunk} at most; more are several launches."
        )
    if card.heads_divide:
        yield "A tile of heads has no tail: it is the largest power of two that divides the heads."
    if not card.can_disable_fp_fusion:
        yield "Multiply and add may be contracted here: RoPE may be off by an ULP."


def _segments(card: Card, num_heads: int) -> list[tuple[int, Plan]]:
    """Where the plan changes as tokens grow: the first number of tokens of each plan."""
    firsts = {1, *(rule.min_tokens for rule in card.rules)}
    firsts |= {-(-rule.min_units // (num_heads + 1)) for rule in card.rules}
    found: list[tuple[int, Plan]] = []
    for first in sorted(firsts - {0}):
        made = plan(card, Problem(first, num_heads))
        if not found or found[-1][1] != made:
            found.append((first, made))
    return found


def _launch(made: Plan) -> str:
    return "torch operations" if made.kernel == "torch" else str(made.launch)


def plan_text(evidence: Evidence, card: Card) -> str:
    """What a card's file decides, on both sides of each of its boundaries, and why.

    Evidence that names a record is marked if the record is of another kernel.
    """

    def marked(text: str) -> str:
        return re.sub(
            r"results/\S+/(\S+\.jsonl(?:\.gz)?)",
            lambda one: _marked(one[0], evidence.stale_file(one[1], card.name)),
            text,
        )

    bounds = {rule.max_heads for rule in card.rules if rule.max_heads is not None}
    heads = sorted({64, 128} | bounds | {bound + 1 for bound in bounds})
    by_plan: dict[tuple[tuple[int, Plan], ...], list[int]] = {}
    for num_heads in heads:
        by_plan.setdefault(tuple(_segments(card, num_heads)), []).append(num_heads)
    rows = []
    for segments, alike in by_plan.items():
        of_heads = ", ".join(map(str, alike)) if len(by_plan) > 1 else "any"
        lasts = [first - 1 for first, _ in segments[1:]]
        for (first, made), last in zip(segments, [*lasts, None], strict=True):
            tokens = f"{first} to {last}" if last else f"from {first}"
            tokens = "any" if len(segments) == 1 else tokens
            rows.append([of_heads, tokens, _launch(made), made.reason, marked(made.evidence)])
    if card.toolchain is not None:
        below = f"the toolchain is below {card.toolchain.floor}: {card.toolchain.why}"
        rows.append(["any", "any", str(DEFAULT_LAUNCH), below, card.evidence])
    headers = ["heads", "tokens", "launch", "why", "evidence"]
    return paragraphs(bullets(_facts(card)), table(headers, rows))
