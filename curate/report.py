"""What became of the documents: numbers for machines, and one page for people."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from penjing.core.config import Config
from penjing.core.pages.page import AFTER, BEFORE, figure, render_page
from penjing.core.progress import plural
from penjing.curate.learned.facts import Learned

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from penjing.curate.plan import Plan
    from penjing.curate.task import Counts

READ = "read"
_SHOWN = 5  # reasons in a summary
PAGE = """
<p>{{ report.read.documents | count }} documents with {{ report.read.chars | count }} characters were read, and
{{ report.kept.documents | count }} with {{ report.kept.chars | count }} kept.
{% if report.damaged or report.lines %}{{ report.damaged }} documents and {{ report.lines }} lines of texts were damaged
and left out; <code>quarantine.jsonl</code> lists them.{% endif %}</p>
<h2>What each step left</h2>
<div class="wide"><table><tr><th>after</th><th>documents</th><th>characters</th><th>of those read</th></tr>
{% for step in report.funnel %}<tr><td>{{ step.step }}</td><td>{{ step.documents | count }}</td>
<td>{{ step.chars | count }}</td><td>{{ "%.1f" | format(100 * step.chars / (report.read.chars or 1)) }} %</td></tr>
{% endfor %}</table></div>
{% for title, rows in (("By domain", report.domains), ("By language", report.languages)) %}
<h2>{{ title }}</h2>
<div class="wide"><table><tr><th></th><th>documents read</th><th>kept</th><th>characters kept</th></tr>
{% for row in rows %}<tr><td>{{ row.name or "not told" }}</td><td>{{ row.read | count }}</td>
<td>{{ row.kept.documents | count }}</td><td>{{ row.kept.chars | count }}</td></tr>
{% endfor %}</table></div>
{% endfor %}
<h2>What each rule dropped</h2>
<div class="wide"><table><tr><th>step</th><th>rule</th><th>documents</th><th>characters</th></tr>
{% for rule in report.rules %}<tr><td>{{ rule.step }}</td><td>{{ rule.rule }}</td><td>{{ rule.documents | count }}</td>
<td>{{ rule.chars | count }}</td></tr>
<tr><td></td><td class="text" colspan="3"><details><summary>examples</summary>
{% for example in rule.examples %}<p><code>{{ example[0] }}</code><br>{{ example[1] }}</p>{% endfor %}
</details></td></tr>
{% endfor %}</table></div>
{% if report.personal %}<h2>Personal data that was replaced</h2>
<div class="wide"><table><tr><th>step</th><th>kind</th><th>values</th><th>documents that had any</th></tr>
{% for row in report.personal %}<tr><td>{{ row.step }}</td><td>{{ row.kind }}</td><td>{{ row.values | count }}</td>
<td>{{ row.documents | count }}</td></tr>
{% endfor %}</table></div>{% endif %}
{% if report.made %}<h2>Documents that were made</h2>
<div class="wide"><table><tr><th>step</th><th>outcome</th><th>number</th></tr>
{% for row in report.made %}<tr><td>{{ row.step }}</td><td>{{ row.outcome }}</td><td>{{ row.number | count }}</td></tr>
{% endfor %}</table></div>{% endif %}
{% for row, drawn in judged %}<h2>What step {{ row.step }} learned</h2>
<p>It learned from {{ row.examples | count }} examples, {{ row.positive | count }} of them {{ row.speaks_of }}, and
looked at {{ row.sample | count }} documents first. Judged on examples that were held back: area under the ROC curve
{{ "%.3f" | format(row.auc) }}, calibration error {{ "%.3f" | format(row.calibration_error) }}. Threshold
{% for domain, value in row.thresholds.items() %}{{ "%.3f" | format(value) }}{% if domain %} for {{ domain }}{% endif %}
{{- ", " if not loop.last }}{% endfor %} ({{ row.chosen }}).
{% if row.student %}A fastText student decides below {{ "%.3f" | format(row.student.low) }} and from
{{ "%.3f" | format(row.student.high) }} on: {{ "%.0f" | format(100 * row.student.decided) }} % of documents that were
held back, on which it and the encoder together end as the encoder alone in
{{ "%.1f" | format(100 * row.student.agreement) }} %.{% endif %}</p>
{{ drawn }}
<div class="wide"><table><tr><th>judged by</th><th>documents</th></tr>
{% for name, number in row.decided.items() %}<tr><td>{{ name }}</td><td>{{ number | count }}</td></tr>{% endfor %}
</table></div>
{% if row.kinds %}<div class="wide"><table><tr><th>kind of noise</th><th>area under the ROC curve</th></tr>
{% for name, value in row.kinds.items() %}<tr><td>{{ name }}</td><td>{{ "%.3f" | format(value) }}</td></tr>{% endfor %}
</table></div>{% endif %}
{% endfor %}
<h2>Sizes of documents</h2>
{{ sizes }}
<h2>Sources</h2>
<div class="wide"><table><tr><th>source</th><th>licence</th><th>files</th><th>bytes</th></tr>
{% for source in report.sources %}<tr><td>{{ source.name }}</td><td>{{ source.licence or "not said" }}</td>
<td>{{ source.files | count }}</td><td>{{ source.bytes | volume }}</td></tr>
{% endfor %}</table></div>
"""


class Amount(Config):
    """Documents and their characters."""

    documents: int = Field(ge=0, description="Documents.")
    chars: int = Field(ge=0, description="Their characters.")


class FunnelRow(Amount):
    """What was left after a step."""

    step: str = Field(description='The step: its place and kind, or "read".')


class GroupRow(Config):
    """A domain or language."""

    name: str = Field(description="The domain or language.")
    read: int = Field(ge=0, description="Documents when it was first known.")
    kept: Amount = Field(description="What is in the corpus.")


class RuleRow(Amount):
    """What a rule dropped."""

    step: str = Field(description="The step.")
    rule: str = Field(description="The rule.")
    examples: list[list[str]] = Field(description="Id and beginning of a few of the documents.")


class PersonalRow(Config):
    """Personal data of a kind."""

    step: str = Field(description="The step.")
    kind: str = Field(description='The kind, such as "email".')
    values: int = Field(ge=0, description="Values that were replaced.")
    documents: int = Field(ge=0, description="Documents that had any.")


class MadeRow(Config):
    """What a step that makes documents came to."""

    step: str = Field(description="The step.")
    outcome: str = Field(description='Such as "made", or why a document or a sentence was not.')
    number: int = Field(ge=0, description="Documents or sentences.")


class SourceRow(Config):
    """A source and its files."""

    name: str = Field(description="Its name.")
    licence: str = Field(description="Its licence as the recipe says.")
    files: int = Field(ge=0, description="Files.")
    bytes: int = Field(ge=0, description="Their size as they lie on the disk.")


class CorpusReport(Config):
    """Content of a corpus's `report.json`."""

    schema_version: Literal[1] = Field(default=1, description="Version of this format.")
    read: Amount = Field(description="What was read.")
    kept: Amount = Field(description="What is in the corpus.")
    damaged: int = Field(ge=0, description="Documents that could not be read, or on which a step failed.")
    lines: int = Field(ge=0, description="Lines of texts that could not be read.")
    reasons: dict[str, int] = Field(description="Damages by reason.")
    funnel: list[FunnelRow] = Field(description="What each step left.")
    domains: list[GroupRow] = Field(description="By domain.")
    languages: list[GroupRow] = Field(description="By language.")
    rules: list[RuleRow] = Field(description="What each rule dropped, most first.")
    personal: list[PersonalRow] = Field(default=[], description="Personal data that was replaced, most first.")
    made: list[MadeRow] = Field(default=[], description="What steps made of documents, and what failed its check.")
    learned: list[Learned] = Field(default=[], description="What steps learned, and how well.")
    sizes: dict[str, dict[str, int]] = Field(
        description='Documents "before" and "after" by the logarithm to base 2 of their characters, rounded.'
    )
    sources: list[SourceRow] = Field(description="Where documents came from.")

    def summary(self) -> str:
        """A few lines for the terminal."""
        width = max(len(row.step) for row in self.funnel)
        lines = [
            f"{row.step:{width}}  {row.documents:>11,} documents  {row.chars:>15,} characters" for row in self.funnel
        ]
        if self.damaged or self.lines:
            reasons = ", ".join(f"{reason}: {count:,}" for reason, count in list(self.reasons.items())[:_SHOWN])
            reasons += f" and {len(self.reasons) - _SHOWN:,} more reasons" * (len(self.reasons) > _SHOWN)
            lines.append(
                f"left out as damaged: {plural(self.damaged, 'document')} and {plural(self.lines, 'line')} ({reasons})"
            )
        if self.personal:
            said = ", ".join(f"{row.values:,} {row.kind}" for row in self.personal)
            lines.append(f"personal data replaced: {said}")
        for step in dict.fromkeys(row.step for row in self.made):
            said = ", ".join(f"{row.outcome}: {row.number:,}" for row in self.made if row.step == step)
            lines.append(f"step {step}: {said}")
        for row in self.learned:
            by = ", ".join(f"{number:,} by {name}" for name, number in row.decided.items())
            lines.append(
                f"step {row.step}: AUC {row.auc:.3f} and calibration error {row.calibration_error:.3f} on examples "
                f"held back; judged {by or 'nothing'}"
            )
        return "\n".join(lines)


def corpus_report(plan: Plan, counts: Counts, learned: list[Learned]) -> CorpusReport:
    """What the stages counted and their steps learned, put together."""
    steps = [READ, *(f"{place}: {step.kind}" for place, step in enumerate(plan.recipe.steps))]
    amounts = {step: [0, 0] for step in steps}
    domains: dict[str, dict[str, list[int]]] = {step: {} for step in steps}
    languages: dict[str, dict[str, list[int]]] = {step: {} for step in steps}
    for key, (documents, chars) in counts.after.items():
        step, domain, language = key.split("\t")
        for entry in (
            amounts[step],
            domains[step].setdefault(domain, [0, 0]),
            languages[step].setdefault(language, [0, 0]),
        ):
            entry[0], entry[1] = entry[0] + documents, entry[1] + chars
    told = [step for step in steps if any(languages[step]) and set(languages[step]) != {""}]
    first_told = told[0] if told else READ
    return CorpusReport(
        read=_amount(amounts[READ]),
        kept=_amount(amounts[steps[-1]]),
        damaged=counts.num_damaged,
        lines=counts.num_lines,
        reasons=dict(sorted(counts.reasons.items(), key=lambda each: -each[1])),
        funnel=[FunnelRow(step=step, documents=amounts[step][0], chars=amounts[step][1]) for step in steps],
        domains=_groups(domains[READ], domains[steps[-1]]),
        languages=_groups(languages[first_told], languages[steps[-1]]),
        rules=sorted(
            (
                RuleRow(
                    step=key.split("\t")[0], rule=key.split("\t")[1], documents=documents, chars=chars,
                    examples=counts.examples[key],
                )
                for key, (documents, chars) in counts.rules.items()
            ),
            key=lambda row: -row.documents,
        ),
        personal=sorted(
            (
                PersonalRow(step=key.split("\t")[0], kind=key.split("\t")[1], values=values, documents=documents)
                for key, (values, documents) in counts.personal.items()
            ),
            key=lambda row: (row.step, -row.values, row.kind),
        ),
        made=[
            MadeRow(step=step, outcome=outcome, number=number)
            for place, each in enumerate(plan.recipe.steps)
            if each.kind == "augment"
            for step in [f"{place}: {each.kind}"]
            for outcome, number in _decided(counts, step).items()
        ],
        learned=[row.model_copy(update={"decided": _decided(counts, row.step)}) for row in learned],
        sizes={when: dict(sorted(of.items(), key=lambda each: int(each[0]))) for when, of in counts.sizes.items()},
        sources=[
            SourceRow(
                name=source.name, licence=source.licence,
                files=sum(file.source == number for file in plan.files),
                bytes=sum(file.size for file in plan.files if file.source == number),
            )
            for number, source in enumerate(plan.recipe.sources)
        ],
    )  # fmt: skip


def report_page(report: CorpusReport) -> str:
    """The page, which needs no other file."""

    def draw(axes: Axes) -> None:
        sizes = sorted({int(size) for when in report.sizes.values() for size in when})
        for offset, (when, colour) in zip((-0.2, 0.2), (("before", BEFORE), ("after", AFTER)), strict=True):
            counted = [report.sizes[when].get(str(size), 0) for size in sizes]
            axes.bar([size + offset for size in sizes], counted, width=0.4, color=colour, label=when)
        axes.set_xticks(sizes, [f"{2**size:,}" for size in sizes], rotation=45)
        axes.set_xlabel("characters of a document, about")
        axes.set_ylabel("documents")
        axes.legend(frameon=False)

    judged = [(row, figure(lambda axes, row=row: _reliability(axes, row), 5, 3)) for row in report.learned]
    return render_page("Corpus", PAGE, {"report": report, "sizes": figure(draw, 8, 3), "judged": judged})


def _reliability(axes: Axes, row: Learned) -> None:
    """Probabilities beside shares of examples that were held back, over the probabilities of the sample."""
    most = max([1, *row.histogram])
    width = 1 / len(row.histogram)
    places = [(place + 0.5) * width for place in range(len(row.histogram))]
    axes.bar(
        places, [count / most for count in row.histogram], width=width, color=BEFORE, label="the sample, by number"
    )
    axes.plot([0, 1], [0, 1], color="gray", linewidth=0.8)
    axes.plot([each.expected for each in row.reliability], [each.found for each in row.reliability], "o-", color=AFTER,
              label=f"examples held back: share of {row.speaks_of}")  # fmt: skip
    axes.set_xlabel(f"probability of {row.speaks_of}")
    axes.legend(frameon=False)


def _decided(counts: Counts, step: str) -> dict[str, int]:
    """Documents of a step by what judged them."""
    pairs = [(key.split("\t"), number) for key, number in counts.decided.items()]
    return {by: number for (where, by), number in sorted(pairs) if where == step}


def _amount(entry: list[int]) -> Amount:
    return Amount(documents=entry[0], chars=entry[1])


def _groups(read: dict[str, list[int]], kept: dict[str, list[int]]) -> list[GroupRow]:
    rows = [
        GroupRow(name=name, read=documents, kept=_amount(kept.get(name, [0, 0])))
        for name, (documents, _) in read.items()
    ]
    return sorted(rows, key=lambda row: -row.kept.chars)
