"""What ranks other than 0 do: they train along and write their parts of checkpoints. Rank 0 does everything else."""

from __future__ import annotations

import tempfile
from pathlib import Path

import outcore
from outcore.command.train.command_ranks import CommandRanks
from outcore.command.train.loop.preemption import Preemption
from outcore.command.train.planned_run import PlannedRun
from outcore.command.train.settings.run_settings import RunSettings


def follow_train(settings: RunSettings, ranks: CommandRanks) -> None:
    """Train along with rank 0.

    Raises:
        SaidElsewhereError: Rank 0 failed.
    """
    ranks.gather()
    job = PlannedRun.told(settings, ranks.hear())
    if settings.dry_run:  # rank 0 has its data in a folder of its own, maybe on another machine, and only for a while
        with tempfile.TemporaryDirectory() as cache:
            job.trainer(job.load_data(Path(cache)), ()).end()
        ranks.hear()  # rank 0 has found that the model could be saved
        return
    data = ranks.hear()
    with Preemption(settings.save_every_minutes, settings.grace) as preemption:
        trainer = job.trainer(data, (preemption,))
        try:
            trainer.preemption = preemption
            checkpoint, trains = ranks.hear()
            if trains:
                trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
                ranks.hear()  # rank 0 has made a folder for the model
                outcore.save_pretrained(trainer.model, settings.out)
        finally:
            ranks.has_begun = preemption.has_begun
            trainer.end()
