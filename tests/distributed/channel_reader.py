"""A process that is a rank: prints the checksum of every message it receives.

Usage: channel_reader.py ADDRESS RANK
"""

from __future__ import annotations

import sys
import zlib

from atom.distributed.broadcast import Address, Subscriber
from atom.distributed.channel import ChannelClosedError

assert "torch" not in sys.modules, "a reader must be light"

subscriber = Subscriber.connect(Address.decode(sys.argv[1].encode()), int(sys.argv[2]))
print("connected", flush=True)
try:
    while True:
        print(zlib.crc32(subscriber.receive(300)), flush=True)
except ChannelClosedError:
    print("closed", flush=True)
