"""`forked_python.py SOCKET -m MODULE ARGUMENTS` does what `python -m MODULE ARGUMENTS` does, by `tests.support.forks`.

It runs without the packages of the project, so that it starts in a moment.
"""

import json
import os
import socket
import sys

path, flag, *command = sys.argv[1:]
assert flag == "-m", sys.argv
with socket.socket(socket.AF_UNIX) as link:
    link.connect(path)
    spec = {"function": "tests.support.forks:run_module", "arguments": command, "prepare": "", "patience_s": 20}
    socket.send_fds(link, [json.dumps({**spec, "cwd": os.getcwd(), "env": dict(os.environ)}).encode()], [1, 2])
    _, answer = link.makefile("r")
answer = json.loads(answer)
sys.exit(f"left running: {answer['left']}" if answer["left"] else answer["status"])
