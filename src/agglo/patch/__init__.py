"""What users of agglo call on a model.

Apply, remove, reduction, trace, and for vision-language models image_tokens and adapt_processor.

All may be called while other threads run the model. A forward pass that has begun goes on to its end with the plan, the
method and the traces that it began with; one that begins later has those of its time; none sees half of an `apply`.
Calls of `apply` and `remove` wait for each other. (The weights are not watched over: training, moving or loading them
while the model runs is seen by the passes that run. And where DataParallel copies a model for several devices, changing
it while it is copied is as unsafe as without agglo.)
"""

from agglo.patch.applying import adapt_processor, apply, image_tokens, remove
from agglo.patch.reporting import Report, report, trace

__all__ = ["UNREAD", "Report", "adapt_processor", "apply", "image_tokens", "remove", "report", "trace"]
