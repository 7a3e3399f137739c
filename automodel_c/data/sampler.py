"""Which samples a rank sees, in which order."""

import torch


def check_batch_sizes(global_batch_size, local_batch_size, dp_size):
    """ValueError unless a global batch is whole microbatches of every rank."""
    if global_batch_size % (local_batch_size * dp_size):
        raise ValueError(
            f"step_scheduler.global_batch_size={global_batch_size} is no multiple of"
            f" local_batch_size * dp_size = {local_batch_size} * {dp_size}"
        )


class GlobalBatchSampler:
    """Index lists of one rank's microbatches, several a step, for a whole run.

    A step's global batch is a slice of the epoch's order, which depends on seed and epoch alone; microbatch m of
    rank r takes samples (m * dp_size + r) * local_batch_size onwards. So the samples of a step are the same for any
    number of ranks. The tail of an epoch that fills no global batch is dropped. Iteration starts at `first_step`.
    """

    def __init__(
        self,
        samples,
        *,
        global_batch_size,
        local_batch_size,
        dp_rank=0,
        dp_size=1,
        seed=0,
        shuffle=True,
        max_steps=None,
        num_epochs=1,
        first_step=0,
    ):
        per_round = local_batch_size * dp_size
        check_batch_sizes(global_batch_size, local_batch_size, dp_size)
        if samples < global_batch_size:
            raise ValueError(
                f"the data set has {samples} samples, step_scheduler.global_batch_size={global_batch_size}"
            )
        self.samples = samples
        self.global_batch_size, self.local_batch_size = global_batch_size, local_batch_size
        self.dp_rank, self.dp_size = dp_rank, dp_size
        self.seed, self.shuffle = seed, shuffle
        self.microbatches = global_batch_size // per_round
        self.steps_per_epoch = samples // global_batch_size
        self.steps = num_epochs * self.steps_per_epoch
        if max_steps is not None:
            self.steps = min(self.steps, max_steps)
        if first_step > self.steps:
            raise ValueError(f"the run has {self.steps} steps, the checkpoint is past them at step {first_step}")
        self.first_step = first_step

    def __len__(self):
        return (self.steps - self.first_step) * self.microbatches

    def __iter__(self):
        order, order_epoch = None, None
        for step in range(self.first_step, self.steps):
            epoch, batch = divmod(step, self.steps_per_epoch)
            if epoch != order_epoch:
                order, order_epoch = self._order(epoch), epoch
            start = batch * self.global_batch_size
            for microbatch in range(self.microbatches):
                at = start + (microbatch * self.dp_size + self.dp_rank) * self.local_batch_size
                yield order[at : at + self.local_batch_size]

    def _order(self, epoch):
        if not self.shuffle:
            return list(range(self.samples))
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        return torch.randperm(self.samples, generator=generator).tolist()
