"""A real IPython kernel, and what a cell gave there."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from jupyter_client.manager import KernelManager, start_new_kernel

ANSI = re.compile(r"\x1b\[[0-9;]*m")
WIDGET = "application/vnd.jupyter.widget-view+json"
SETUP = "%load_ext tracefuse\nimport torch\nx = torch.randn(4, 4, requires_grad=True)"
QUICK = "%%tracefuse --no-measure"


@dataclass
class Reply:
    """What one cell gave: the reply's `status`, its error as (name, plain traceback), streams, and displayed bundles."""

    status: str = ""
    error: tuple[str, str] | None = None
    text: str = ""
    displayed: list[dict[str, Any]] = field(default_factory=list)
    value: str | None = None

    @property
    def shows_view(self) -> bool:
        return any(WIDGET in bundle for bundle in self.displayed)


class Kernel:
    def __init__(self) -> None:
        self.manager: KernelManager
        self.manager, self.client = start_new_kernel(kernel_name="python3")

    def send(self, code: str, cell: str = "") -> str:
        """`cell` is what a front end calls it, which shows views: JupyterLab and VS Code do, nbclient does not."""
        if not cell:
            return self.client.execute(code)
        content = {
            "code": code, "silent": False, "store_history": True, "user_expressions": {}, "allow_stdin": False,
            "stop_on_error": True,
        }  # fmt: skip
        message = self.client.session.msg("execute_request", content, metadata={"cellId": cell})
        self.client.shell_channel.send(message)
        return message["header"]["msg_id"]

    def run(self, code: str, timeout_s: float = 600, cell: str = "") -> Reply:
        return self.collect(self.send(code, cell), timeout_s)

    def collect(self, request: str, timeout_s: float = 600) -> Reply:
        reply, idle = Reply(), False
        while not idle:
            message = self.client.get_iopub_msg(timeout=timeout_s)
            if message["parent_header"].get("msg_id") == request:
                idle = _read(message["msg_type"], message["content"], reply)
        while True:
            answer = self.client.get_shell_msg(timeout=timeout_s)
            if answer["parent_header"].get("msg_id") == request:
                reply.status = answer["content"]["status"]
                return reply

    def wait_for_text(self, request: str, text: str, timeout_s: float = 60) -> None:
        """Until `request` has written `text`: what other cells write late does not count."""
        written = Reply()
        while text not in written.text:
            message = self.client.get_iopub_msg(timeout=timeout_s)
            if message["parent_header"].get("msg_id") == request:
                _read(message["msg_type"], message["content"], written)

    def value(self, expression: str) -> str:
        reply = self.run(expression)
        assert reply.status == "ok", reply.error
        assert reply.value is not None
        return reply.value


def _read(kind: str, content: dict[str, Any], reply: Reply) -> bool:
    if kind == "stream":
        reply.text += content["text"]
    elif kind == "display_data" or (kind == "update_display_data" and WIDGET in content["data"]):
        reply.displayed.append(content["data"])  # a view may take the place of what says how far it is
    elif kind == "execute_result":
        reply.value = content["data"]["text/plain"]
    elif kind == "error":
        reply.error = (content["ename"], ANSI.sub("", "\n".join(content["traceback"])))
    return kind == "status" and content["execution_state"] == "idle"
