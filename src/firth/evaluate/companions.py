"""What the packages after `train` bring to a pretraining: samples at its checkpoints, and the recommended rate."""

from __future__ import annotations

from firth.evaluate.checkpoint_samples import make_checkpoint_sampler
from firth.recipes.pretraining import recommend_rate
from firth.train.pretrain import Companions

COMPANIONS = Companions(make_checkpoint_sampler, recommend_rate)
