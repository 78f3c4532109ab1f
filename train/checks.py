"""What a run refuses before it begins, and how long it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from penjing.core.errors import ConfigError, InputError
from penjing.core.files import check_replaceable
from penjing.core.manifest import MANIFEST_NAME
from penjing.core.work import alone_in
from penjing.train.batch_size import Cut, check_shares
from penjing.train.families.base import Task
from penjing.train.numerics.precision import check_hardware
from penjing.train.pipeline.schedules import pipeline_order
from penjing.train.plan.preflight import check_recipe
from penjing.train.processes.devices import choose_device
from penjing.train.processes.world import World
from penjing.train.recipe.recipe import RunRecipe


def check_machine(recipe: RunRecipe, processes: int, *, is_new: bool) -> None:
    """Refuse what this machine or this number of processes cannot do, before any data is prepared.

    Raises:
        ConfigError: names the setting.
    """
    check_hardware(recipe.precision, choose_device(recipe.device))
    check_recipe(recipe, processes)
    if is_new:  # one that goes on cuts its batch anew
        data, shares = recipe.data, recipe.parallel.data_size(processes)
        check_shares(data.batch_size, shares, processes)
        if isinstance(data.micro_batch, int):
            Cut(data.batch_size, shares, data.micro_batch).check()
        if recipe.parallel.pp > 1:
            size = data.micro_batch or recipe.parallel.default_micro_batch(data.batch_size // shares)
            assert isinstance(size, int), "check_recipe refuses auto"
            check_schedule(recipe, Cut(data.batch_size, shares, size))
        if recipe.parallel.shares == "auto" and shares > 1:
            _check_granularity(recipe, shares)


def check_output(recipe: RunRecipe, *, is_new: bool, force: bool) -> None:
    """Refuse an output that is there, unless the run goes on or may replace it, and one that is none.

    Raises:
        InputError: see `claimed_output`.
    """
    if is_new and not force:
        if (recipe.output / MANIFEST_NAME).exists():
            raise InputError(
                f"output {recipe.output} already exists; replace it with --force, or choose another output"
            )
        if any((recipe.run_folder / "checkpoints").glob("step-*")):
            raise InputError(
                f"{recipe.run_folder} holds checkpoints of an earlier run; "
                "go on with --resume auto, or start again with --force"
            )
    check_replaceable(recipe.output, True, MANIFEST_NAME)  # not after the last step


@contextmanager
def claimed_output(recipe: RunRecipe, resume: str, force: bool, is_main: bool) -> Iterator[None]:
    """Refuse to write over a checkpoint or a run, unless `force`, and over anything that is neither; the run folder
    belongs to this run alone until the block ends.

    Args:
        is_main: this process holds the folder, for all of its run.

    Raises:
        InputError: there is one, or the output is a file, lies in one, or is a folder that penjing did not make.
        SetupError: another run trains there.
    """
    check_output(recipe, is_new=resume == "never", force=force)
    with alone_in(recipe.run_folder) if is_main else nullcontext():
        yield


def with_steps(recipe: RunRecipe, task: Task) -> RunRecipe:
    """The recipe with as many steps as its `epochs` of the task's data make.

    Raises:
        ConfigError: the data do not say how many samples they are.
    """
    if recipe.epochs is None:
        return recipe
    samples = task.stream(1, World(size=recipe.data.batch_size)).state_dict().get("num_samples")
    if samples is None:
        raise ConfigError(f"epochs = {recipe.epochs:g}: these data do not tell how many samples they are; give steps")
    return recipe.model_copy(update={"steps": recipe.num_steps(samples)})


def check_schedule(recipe: RunRecipe, cut: Cut) -> None:
    """Refuse a number of micro-batches that the pipeline's schedule cannot run, or that does not make a step.

    Raises:
        ConfigError: gives the schedule's reason, or the numbers that make one.
    """
    parallel, size, whole = recipe.parallel, cut.micro_batch, cut.accumulation
    if parallel.pp == 1:
        return
    num = parallel.micro_batches or whole
    if whole % num:
        fitting = ", ".join(str(each) for each in range(1, whole + 1) if whole % each == 0)
        raise ConfigError(
            f"parallel.micro_batches={num} does not divide the {whole} micro-batches of data.micro_batch={size} that a "
            f"step has; take one of {fitting}, or change data.micro_batch or data.batch_size"
        )
    if parallel.balance:  # which chooses its own micro-batches as it goes on
        return
    try:
        pipeline_order(parallel.schedule, parallel.pp, num)
    except ConfigError as error:
        raise ConfigError(
            f"parallel.schedule = {parallel.schedule!r} with pp={parallel.pp} cannot run {num} micro-batches of "
            f"data.micro_batch={size} ({error}); change data.micro_batch or data.batch_size, or use 'gpipe'"
        ) from None


def _check_granularity(recipe: RunRecipe, processes: int) -> None:
    """Refuse micro-batches so large that a process has one alone, of which nothing can go to another.

    Raises:
        ConfigError: names a size.
    """
    data, share = recipe.data, recipe.data.batch_size // processes
    if share == 1:
        raise ConfigError(
            f"parallel.shares = 'auto' moves samples from slow processes to fast ones, and data.batch_size="
            f"{data.batch_size} leaves each of {processes} a single one; raise it to {8 * processes}, or set 'equal'"
        )
    if data.micro_batch == share:
        raise ConfigError(
            f"parallel.shares = 'auto' moves micro-batches from slow processes to fast ones, and data.micro_batch="
            f"{share} leaves each of {processes} a single one; lower it to "
            f"{recipe.parallel.default_micro_batch(share)}, or set 'equal'"
        )
