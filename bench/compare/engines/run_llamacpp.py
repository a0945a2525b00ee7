"""llama.cpp's server over HTTP, prompts as token ids, tokens streamed. Standard library only.

With `-lm none` weights are copied instead of mapped, which decodes faster; so do the huge pages
that GLIBC_TUNABLES asks for.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

from driver import Timing, main

# Tokens of context of a slot: enough for the longest request of the batches, and alone for any.
SLOT_TOKENS = 1024
SINGLE_TOKENS = 8192
START_TIMEOUT_S = 300
STOP_TIMEOUT_S = 20


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class LlamaCpp:
    name = "llama.cpp"

    def __init__(self, args):
        self.args = args
        # The server does not know its own build; setup.sh puts it into the folder's name.
        build = Path(args.server).parent.name.rpartition("-")[2]
        self.version = f"b{build.partition('.')[0]}"
        self.server = None

    def load(self):
        args, slots = self.args, self.args.max_seqs
        self.port = free_port()
        context = SINGLE_TOKENS if slots == 1 else slots * SLOT_TOKENS
        threads = str(args.threads)
        command = [args.server, "-m", args.model, "--port", str(self.port), "-t", threads,
                   "-tb", threads, "-np", str(slots), "-c", str(context), "-lm", "none"]
        # The server stands for the engine: Python's start does not count.
        args.started = time.time()
        self.server = subprocess.Popen(
            command, env={**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"})
        while not self.is_ready():
            if self.server.poll() is not None:
                raise RuntimeError(f"the server ended with {self.server.returncode}")
            if time.time() - args.started > START_TIMEOUT_S:
                self.close()
                raise RuntimeError(f"the server was not ready after {START_TIMEOUT_S} s")
            time.sleep(0.02)

    def is_ready(self):
        try:
            url = f"http://127.0.0.1:{self.port}/health"
            with urllib.request.urlopen(url, timeout=2) as answer:
                return answer.status == 200
        except OSError:
            return False

    def run(self, requests, _):
        async def all_at_once():
            begin = time.perf_counter()
            return await asyncio.gather(*[self.ask(request, begin) for request in requests])

        return asyncio.run(all_at_once())

    async def ask(self, request, begin):
        """Streams one completion."""
        body = json.dumps({
            "prompt": request["prompt_token_ids"],
            "max_tokens": request["max_tokens"],
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
                     b"Content-Type: application/json\r\n"
                     b"Content-Length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()
        status = await reader.readline()
        if b" 200" not in status:
            raise RuntimeError(f"{status.decode().strip()}: {(await reader.read(200)).decode()}")
        first = last = num_tokens = None
        async for line in reader:
            if not line.startswith(b"data:") or b"[DONE]" in line:
                continue
            now = time.perf_counter() - begin
            event = json.loads(line[5:])
            if "error" in event:
                raise RuntimeError(str(event["error"]))
            if event.get("choices"):
                first = now if first is None else first
                last = now
            if event.get("usage"):
                num_tokens = event["usage"]["completion_tokens"]
        writer.close()
        return Timing(first, last, num_tokens)

    def close(self):
        if self.server and self.server.poll() is None:
            self.server.send_signal(signal.SIGTERM)
            try:
                self.server.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.server.kill()
                self.server.wait()


if __name__ == "__main__":
    main(LlamaCpp)
