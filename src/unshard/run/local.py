"""Running a plan on this machine, with threads."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from unshard.errors import raise_all
from unshard.files import OpenFiles
from unshard.plan.moves import Plan, PlannedFile
from unshard.report.events import Message, Sink
from unshard.report.meter import Meter
from unshard.run.claims import check_claims
from unshard.run.copying import Copier
from unshard.run.decoding import scratch_beside
from unshard.run.jobs import Worker
from unshard.run.preflight import check_output
from unshard.run.publish import stage
from unshard.run.results import Rounding, RunResult
from unshard.run.schedule import Schedule
from unshard.run.threads import Budget, hold_interrupts, run_threads
from unshard.run.writing import Output
from unshard.settings import Settings
from unshard.words import items_in_words


def run_plan(plan: Plan, output: Path, settings: Settings, sink: Sink, overwrite: bool = False) -> RunResult:
    """Check the target and the plan's claims, write all files, and publish them together.

    The directory `output` is made where it is missing. It must be empty, but for what a killed run left behind, unless
    `overwrite` is given: then the model in it is replaced (see `occupants.REPLACEABLE`), and nothing else touched.

    Raises OutputError for everything about the target (all of it at once, before the first byte, as far as it can be
    known), IncompleteError or ModelError for claims that do not hold, FormatError where a source cannot be read. After
    any error, and after KeyboardInterrupt, the directory is as it was before; once the new files get their names, an
    interrupt waits until they have them, and the end of the phase has been told.
    """
    scratch = scratch_beside(output, plan, settings)
    raise_all(check_output(plan, output, overwrite=overwrite, scratch=scratch.room))
    raise_all(check_claims(plan, settings, sink, scratch))
    with ExitStack() as until_told, Meter(sink, "write", plan.size) as meter:
        with stage(output, plan.files, overwrite=overwrite) as staging:

            def open_output(file: PlannedFile) -> Output:
                return Output(staging.temporary(file), str(output / file.path), file.size)

            if staging.foreign:
                sink(Message("note", f"left in place beside the model: {items_in_words(staging.foreign)}"))
            files = OpenFiles(plan.roots, scratch=replace(scratch, directory=output))
            rounded = _write(files, settings, Schedule(plan.files, settings, open_output), meter)
            until_told.enter_context(hold_interrupts())
            staging.publish()
        return RunResult(meter.seconds, rounded)


def _write(files: OpenFiles, settings: Settings, schedule: Schedule, meter: Meter) -> dict[str, Rounding]:
    """Do all tasks in threads, and tell what was rounded."""
    budget = Budget(settings.memory)
    rounded: dict[str, Rounding] = {}
    workers: list[Worker] = []

    def work() -> None:
        worker = Worker(files, Copier(files), settings, budget)
        workers.append(worker)
        while (assignment := schedule.take()) is not None:
            assignment.task.run(worker, assignment.lane.output)
            meter.add(assignment.task.size)
            schedule.give_back(assignment)

    def stop() -> None:
        schedule.stop()
        files.stop()

    try:
        run_threads(settings.jobs, work, stop)
    finally:
        schedule.close()
        files.close()
    for worker in workers:
        for name, rounding in worker.rounded.items():
            rounded[name] = rounded.get(name, Rounding()) + rounding
    return rounded
