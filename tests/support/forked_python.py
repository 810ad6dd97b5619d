"""`forked_python.py SOCKET -m MODULE ARGUMENTS` does what `python -m MODULE ARGUMENTS` does, by `tests.support.forks`.

It runs without the packages of the project, so that it starts in a moment. It passes SIGTERM on.
"""

import json
import os
import signal
import socket
import sys

path, flag, *command = sys.argv[1:]
assert flag == "-m", sys.argv
with socket.socket(socket.AF_UNIX) as link:
    link.connect(path)
    spec = {"function": "tests.support.forks:run_module", "arguments": command, "patience_s": 20}
    spec["prepare"] = "tests.support.forks:import_engine"
    socket.send_fds(link, [json.dumps({**spec, "cwd": os.getcwd(), "env": dict(os.environ)}).encode()], [1, 2])
    answers = link.makefile("r")
    process = int(answers.readline())
    signal.signal(signal.SIGTERM, lambda *_: os.kill(process, signal.SIGTERM))
    answer = answers.readline()
answer = json.loads(answer)
sys.exit(f"left running: {answer['left']}" if answer["left"] else answer["status"])
