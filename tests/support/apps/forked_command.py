"""A command of this environment, as a shell finds it: a child of the fork server whose socket FORK_SERVER names."""

import json
import os
import signal
import socket
import struct
import sys

name = os.path.basename(sys.argv[0])
script = [] if name == "python" else [os.path.join(os.environ["COMMANDS"], name)]
request = {"arguments": [*script, *sys.argv[1:]], "directory": os.getcwd(), "variables": dict(os.environ)}
server = socket.socket(fileno=int(os.environ["FORK_SERVER"]))
channel, theirs = socket.socketpair()
socket.send_fds(server, [b"\n"], [theirs.fileno(), 0, 1, 2])
theirs.close()
channel.sendall(json.dumps(request).encode() + b"\n")
(pid,) = struct.unpack("!q", channel.recv(8, socket.MSG_WAITALL))
signal.signal(signal.SIGTERM, lambda number, frame: os.kill(pid, number))
(status,) = struct.unpack("!q", channel.recv(8, socket.MSG_WAITALL))
os._exit(status % 256)
