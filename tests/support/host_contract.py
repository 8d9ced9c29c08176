"""The contract of hosts, as `agglo.testing` ships it."""

from agglo.testing import HostContract as HostContract
from agglo.testing import TakenApart as TakenApart
from agglo.testing import assert_same as assert_same
from agglo.testing import tensors as tensors
