"""What users of agglo call on a model.

All may be called while other threads run the model. A forward pass that has begun goes on to its end with the plan, the
method and the traces that it began with. Calls of `apply` and `remove` wait for each other. (Training, moving or
loading weights is seen by passes that run. And where DataParallel copies a model for several devices, changing it while
it is copied is as unsafe as without agglo.)
"""

from agglo.hosts.vlm.applying import image_tokens
from agglo.hosts.vlm.processors import adapt_processor
from agglo.patch.applying import apply, remove
from agglo.patch.reporting import Report, report, trace

__all__ = ["Report", "adapt_processor", "apply", "image_tokens", "remove", "report", "trace"]
