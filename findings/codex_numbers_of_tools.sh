#!/usr/bin/env bash
# Codex 0.171.0 describes the numbers of its own tools as JSON numbers ("type": "number"), and refuses a number that is
# whole but written with a point: exec_command with max_output_tokens 1000 runs, with 1000.0 it answers the model that the
# arguments cannot be parsed. The schema and strict=false promise the model that both are right; models, and JSON writers
# that know doubles alone, do write 1000.0. A policy that writes so sees its calls fail. Fails if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
npm install --silent --no-fund --no-audit --prefix "$folder" @openai/codex@0.171.0
cat > "$folder/serve.py" <<'PYTHON'
import http.server, json, os, subprocess, sys, threading

folder, seen = sys.argv[1], []


def events(request):
    answers = [item["output"] for item in request["input"] if item.get("type") == "function_call_output"]
    if answers:
        item = {"id": "m", "type": "message", "role": "assistant", "status": "completed"}
        item["content"] = [{"type": "output_text", "text": "done", "annotations": []}]
    else:
        item = {"id": "f", "type": "function_call", "status": "completed", "call_id": "c", "name": "exec_command"}
        item["arguments"] = '{"cmd": "echo hi", "max_output_tokens": %s}' % number
    response = {"id": f"r{len(seen)}", "object": "response", "created_at": 0, "model": "m", "status": "completed"}
    response["usage"] = {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2}
    response["usage"] |= {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
    yield "response.created", {"response": {**response, "status": "in_progress", "output": []}}
    yield "response.output_item.done", {"output_index": 0, "item": item}
    yield "response.completed", {"response": {**response, "output": [item]}}


class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_): ...

    def do_POST(self):
        seen.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for kind, fields in events(seen[-1]):
            self.wfile.write(f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode())


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
os.makedirs(f"{folder}/home/.codex")
os.makedirs(f"{folder}/work")
with open(f"{folder}/home/.codex/config.toml", "w") as file:
    file.write(f'''model = "m"
model_provider = "local"
web_search = "disabled"
[model_providers.local]
name = "local"
base_url = "http://127.0.0.1:{server.server_port}/v1"
env_key = "KEY"
wire_api = "responses"
''')
environment = {"PATH": os.environ["PATH"], "HOME": f"{folder}/home", "KEY": "any", "NO_PROXY": "127.0.0.1"}
command = [f"{folder}/node_modules/.bin/codex", "exec", "--skip-git-repo-check"]
command += ["--dangerously-bypass-approvals-and-sandbox", "go on"]
found = []
for number in ("1000", "1000.0"):
    seen.clear()
    subprocess.run(command, env=environment, cwd=f"{folder}/work", stdin=subprocess.DEVNULL, check=True,
                   capture_output=True, timeout=100)
    (tool,) = [tool for tool in seen[0]["tools"] if tool.get("name") == "exec_command"]
    kind = tool["parameters"]["properties"]["max_output_tokens"]["type"]
    (answer,) = [item["output"] for item in seen[-1]["input"] if item.get("type") == "function_call_output"]
    print("described as", kind, "strict:", tool["strict"], "; given", number, "->", answer.splitlines()[0])
    found.append((kind, "exited with code 0" in answer, "failed to parse function arguments" in answer))
sys.exit(0 if found == [("number", True, False), ("number", False, True)] else 1)
PYTHON
python3 "$folder/serve.py" "$folder"
# Seen: described as number strict: False ; given 1000 -> Chunk ID: 4532ed
#       described as number strict: False ; given 1000.0 -> failed to parse function arguments: invalid type: floating
#       point `1000.0`, expected usize at line 1 column 46
