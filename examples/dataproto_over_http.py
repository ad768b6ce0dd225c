"""A scoring service: a DataProto goes there and back over HTTP as safetensors bytes; nothing is pickled."""

import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer

import torch

from ostinato.protocol import DataProto


class Score(BaseHTTPRequestHandler):
    def do_POST(self):
        batch = DataProto.from_bytes(self.rfile.read(int(self.headers["Content-Length"])))
        scored = batch.union(DataProto.from_dict({"score": batch.batch["input_ids"].sum(-1).float()}))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(scored.to_bytes())


server = HTTPServer(("127.0.0.1", 0), Score)
threading.Thread(target=server.serve_forever, daemon=True).start()
asked = DataProto.from_dict({"input_ids": torch.arange(12).reshape(4, 3)}, {"text": ["a", "b", "c", "d"]})
with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}", data=asked.to_bytes()) as reply:
    print(DataProto.from_bytes(reply.read()).batch["score"].tolist())
server.shutdown()
