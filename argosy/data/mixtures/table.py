"""Makes a table of rows from `data.source=[...]`. Each source is found, tokenized, cached and packed like a single source."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from argosy.core.errors import BadInput, UserError
from argosy.data.batch import Fingerprint
from argosy.data.mixtures.order import MixedOrder, OrderBySize, OrderByWeight
from argosy.data.mixtures.rows import MixedRows
from argosy.data.mixtures.settings import MixedSource
from argosy.data.order import packing_of, too_long_of
from argosy.data.pack import counts_of
from argosy.data.prepare import Prepared, Progress
from argosy.data.settings import DataSettings
from argosy.data.sources import RowSource, Source
from argosy.data.summary import CorpusSummary, MixedPart
from argosy.data.tables import Data, RowTable, find, holds_out, table_of

if TYPE_CHECKING:
    from argosy.data.tokenizers.load import Tokenizer


# Fields of a summary that are added up over the sources.
COUNTS = ("held_out_documents", "held_out_tokens", "short_documents", "special_documents", "unanswered", "cut", "dropped", "unlearned",
          "parted", "endless", "identical", "surplus", "absent", "duplicates")  # fmt: skip


@dataclass(frozen=True)
class MixturePart:
    """One source of a mixture.

    mixed: the settings of the source in the mixture.
    settings: the data settings that apply to the source.
    source: the opened source.
    """

    mixed: MixedSource
    settings: DataSettings
    source: Source | RowSource | Prepared

    @property
    def format(self) -> str:
        if isinstance(self.source, Prepared):
            return str(self.source.fingerprint.get("source.format", "text"))
        return self.source.format if isinstance(self.source, Source) else "text"


@dataclass(frozen=True)
class DataMixture:
    """The sources of a mixture.

    settings: the data settings of the run.
    parts: the sources.
    """

    settings: DataSettings
    parts: tuple[MixturePart, ...]

    @cached_property
    def format(self) -> str:
        """The format of the records, if all sources have the same; else `text`."""
        formats = {part.format for part in self.parts}
        return formats.pop() if len(formats) == 1 else "text"


def find_mixture(settings: DataSettings) -> DataMixture:
    """Finds the sources of a mixture.

    Raises:
        BadInput: a source cannot be read, or weights and epochs contradict each other.
    """
    assert isinstance(settings.source, list)
    check_mixture(settings)
    parts = ((mixed, part_settings(mixed, settings)) for mixed in settings.source)
    return DataMixture(settings, tuple(MixturePart(mixed, resolved, find(resolved)) for mixed, resolved in parts))


def check_mixture(settings: DataSettings) -> None:
    """Checks that weights, epochs and temperature do not contradict each other.

    Raises:
        BadInput: these settings contradict each other, or `data.online` is set.
    """
    assert isinstance(settings.source, list)
    weighted = [mixed for mixed in settings.source if mixed.weight is not None]
    if weighted and len(weighted) < len(settings.source):
        unweighted = next(mixed for mixed in settings.source if mixed.weight is None)
        problem = f"`{weighted[0].path}` has a weight, and `{unweighted.path}` has none"
        raise BadInput(problem, where="data.source", hint="give every source a weight, or none")
    if weighted and (both := next((mixed for mixed in weighted if mixed.epochs is not None), None)):
        problem = f"`{both.path}` has a weight and epochs, and either decides how often it is seen"
        raise BadInput(problem, where="data.source", hint="leave one out")
    if weighted and settings.epochs is not None:
        problem = "data.epochs counts passes, and a mixture with weights has none"
        hint = "set `steps`, or give sources `epochs` in place of weights"
        raise BadInput(problem, where=f"data.epochs={settings.epochs:g}", hint=hint)
    if weighted and settings.mixture_temperature is not None:
        problem = "data.mixture_temperature makes weights of sizes, and the sources have weights"
        raise BadInput(problem, where=f"data.mixture_temperature={settings.mixture_temperature:g}", hint="leave one out")
    if settings.online:
        raise BadInput("a mixture is not read online", where="data.source", hint="leave `data.online` off")


def part_settings(mixed: MixedSource, settings: DataSettings, **more: Any) -> DataSettings:
    """The data settings that apply to one source of a mixture: those of the run, overridden by those of the source.

    Args:
        more: settings that override both.
    """
    inherited = {name: getattr(settings, name) for name in settings.model_fields_set - {"source"}}
    return DataSettings(**inherited | mixed.overrides | more, source=mixed.path)


def find_data(settings: DataSettings) -> Source | RowSource | Prepared | DataMixture:
    """Finds what `settings.source` names: one source, or a mixture.

    Raises:
        BadInput: as in `tables.find` and `find_mixture`.
    """
    return find_mixture(settings) if isinstance(settings.source, list) else find(settings)


def mixture_holds_out(settings: DataSettings, source: "Data | DataMixture") -> bool:
    """Whether some of the data, or some of any source of a mixture, is held out for evaluation."""
    if isinstance(source, DataMixture):
        return any(holds_out(part.settings, part.source) for part in source.parts)
    return holds_out(settings, source)


@dataclass(frozen=True)
class MixedTable:
    """The rows of a mixture, and their order.

    table: the rows of all sources.
    order: the order of training, over groups of rows; None for evaluation, which reads each row once.
    names: the paths of the sources.
    parts: the size of each source, for a summary.
    """

    table: RowTable
    order: MixedOrder | None
    names: tuple[str, ...]
    parts: tuple[MixedPart, ...]

    @property
    def places_per_epoch(self) -> int | None:
        return self.order.order.places_per_epoch if self.order else None

    def seen(self, places: int) -> tuple[MixedPart, ...]:
        """The share and the epochs of each source in the first `places` groups of rows."""
        assert self.order is not None
        draws = self.order.order.draws(places)
        total = max(int(draws.sum()), 1)
        each = zip(self.parts, draws.tolist(), self.order.sizes.tolist())
        return tuple(replace(part, share=count / total, epochs=count / size) for part, count, size in each)


def mixture_table(
    mixture: DataMixture,
    split: str,
    tokenizer: "Tokenizer | None",
    vocab: int,
    seed: int,
    progress: Progress | None = None,
    limit: int | None = None,
) -> MixedTable:
    """Makes the table of a mixture's split, `train` or `held_out`. Other arguments are as in `tables.table_of`.

    Raises:
        UserError: as in `tables.table_of`, or sources cannot be mixed, or no source holds anything out.
    """
    tables: list[RowTable] = []
    names: list[str] = []
    used: list[MixturePart] = []
    refused: UserError | None = None
    for part in mixture.parts:
        if split == "held_out" and not holds_out(part.settings, part.source):
            continue
        try:
            tables.append(table_of(part.source, split, part.settings, tokenizer, vocab, seed, progress, limit))
        except UserError as error:
            # A small source may have no held-out rows, while a larger one does.
            if split == "train":
                raise
            refused = error
            continue
        names.append(part.mixed.path)
        used.append(part)
    if not tables:
        raise refused or BadInput("no source of the mixture holds anything out", where="data.held_out")
    rows = MixedRows([table.rows for table in tables], names)
    order = None
    if split == "train":
        groups = [len(table.rows) // rows.per_group for table in tables]
        tokens = [_tokens_of(table) / size for table, size in zip(tables, groups)]
        order = mixed_order([part.mixed for part in used], groups, tokens, rows.per_group, mixture.settings, seed)
    settings = mixture.settings
    identity = _identity(used, tables, settings)
    ratios = [table.bytes_per_token for table in tables]
    sizes = [len(table.rows) for table in tables]
    bytes_per_token = None if None in ratios else float(np.average([value or 0.0 for value in ratios], weights=sizes))
    parts = tuple(
        MixedPart(name, len(table.rows), table.summary.tokens, table.summary.text) for name, table in zip(names, tables)
    )
    return MixedTable(RowTable(rows, identity, bytes_per_token, _summary(tables, settings, rows)), order, tuple(names), parts)


def _identity(parts: list[MixturePart], tables: list[RowTable], settings: DataSettings) -> Fingerprint:
    """The fingerprint of a mixture: the fingerprint, packing and weight of each source, with its number in each key."""
    identity: Fingerprint = {"source": "mixture", "source.count": len(parts)}
    for number, (part, table) in enumerate(zip(parts, tables)):
        table_identity = table.identity
        table_identity |= {"packing": packing_of(part.settings, table_identity), "too_long": too_long_of(part.settings, table_identity)}
        share: Any = (part.mixed.epochs or 1.0) if part.mixed.weight is None else part.mixed.weight
        table_identity |= {"weight": json.dumps(share), "by": "size" if part.mixed.weight is None else "weight"}
        identity |= {f"{name} of {number}": value for name, value in table_identity.items()}
    return identity | {"weight_unit": settings.weight_unit, "temperature": settings.mixture_temperature}


def mixed_order(
    sources: list[MixedSource], groups: list[int], tokens: list[float], per_group: int, settings: DataSettings, seed: int
) -> MixedOrder:
    """Makes the order of a mixture.

    Args:
        sources: the settings of the sources.
        groups: the number of groups of rows in each source.
        tokens: the mean number of tokens in a group of each source. Used only with `data.weight_unit=tokens`.
        per_group: the number of rows in a group.
        seed: the random seed.
    """
    shuffled = seed if settings.shuffle else None
    tokens = tokens if settings.weight_unit == "tokens" else [1.0] * len(sources)
    if sources[0].weight is None and settings.mixture_temperature is None:
        counts = [max(1, round((mixed.epochs or 1.0) * size)) for mixed, size in zip(sources, groups)]
        return MixedOrder(groups, OrderBySize(counts, shuffled), shuffled)
    if settings.mixture_temperature is not None:
        sizes = [(mixed.epochs or 1.0) * size * each for mixed, size, each in zip(sources, groups, tokens)]
        weights: list[Any] = [size ** (1 / settings.mixture_temperature) for size in sizes]
    else:
        weights = [mixed.weight for mixed in sources]
    schedules = [dict(weight) if isinstance(weight, Mapping) else {0: weight} for weight in weights]
    per_step = settings.batch // per_group
    stages = []
    for step in sorted({step for schedule in schedules for step in schedule}):
        now = [schedule[max(at for at in schedule if at <= step)] for schedule in schedules]
        if not any(now):
            raise BadInput(f"all weights are 0 from step {step} on", where="data.source", hint="one source has to be left")
        stages.append((step * per_step, [weight / each for weight, each in zip(now, tokens)]))
    return MixedOrder(groups, OrderByWeight(stages, shuffled), shuffled)


def _tokens_of(table: RowTable) -> int:
    """The number of targets in one epoch of a table; the number of rows if packing has not counted targets."""
    return counts_of(table.rows).targets or len(table.rows)


def _summary(tables: list[RowTable], settings: DataSettings, rows: MixedRows) -> CorpusSummary:
    """The summary of all sources together."""
    each = [table.summary for table in tables]

    def total(name: str) -> int:
        return sum(getattr(summary, name) or 0 for summary in each)

    totals = {name: total(name) or None for name in ("files", "source_bytes", "bytes", "documents", "tokens")}
    counts = {name: total(name) for name in COUNTS}
    names = tuple(dict.fromkeys(name for summary in each for name in summary.special_names))
    ignored = tuple(dict.fromkeys(name for summary in each for name in summary.ignored))
    size: dict[str, Any] = {"rows": len(rows), "sequence": settings.sequence, "batch": settings.batch}
    fields: dict[str, Any] = totals | counts | size | {"special_names": names, "ignored": ignored}
    return CorpusSummary(source=settings.source_name, **fields)
