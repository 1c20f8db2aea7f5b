"""The order in which programs reach the devices of this process."""

from __future__ import annotations

import threading
from typing import Final

#: Programs of several devices wait for each other on all of them. Two threads that launch two programs at once may
#: have one device run the one first and another device the other, and both wait for ever. The devices are those of the
#: process, and so is the lock.
LAUNCHES: Final = threading.RLock()
