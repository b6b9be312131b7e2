"""A load for a live SGLang server: batches of requests of one length, over HTTP."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any, final

import numpy as np

from specgov.controller.cli.errors import CliError, UnreachableError

ANSWER_TIMEOUT_S = 900.0
_ASK_TIMEOUT_S = 10.0


@final
class Load:
    """Sends batches to the server at ``url``.

    Prompts are random token ids from ``first_id`` to ``last_id``; request i of a length is the same each
    time, so that a prefix cache, where there is one, spares the prefill.
    """

    def __init__(self, url: str, first_id: int, last_id: int, seed: int) -> None:
        self._url = url.rstrip("/")
        self._ids = (first_id, last_id)
        self._seed = seed

    def require_answer(self) -> None:
        """Ask once whether a server is there.

        Raises:
            UnreachableError: none answers.
            CliError: the address is none, or what answers is no SGLang server.

        """
        self._send("/model_info", None, _ASK_TIMEOUT_S)

    def batch(self, batch_size: int, prompt_tokens: int, output_tokens: int) -> list[list[int]]:
        """Send requests that run together, and wait for all of them; the token ids of the answers.

        Raises:
            UnreachableError: the server does not answer.
            CliError: the server refuses the requests.

        """
        sampling = {"max_new_tokens": output_tokens, "ignore_eos": True, "temperature": 0}
        body = {"input_ids": self.prompts(batch_size, prompt_tokens), "sampling_params": sampling}
        answers = json.loads(self._send("/generate", body, ANSWER_TIMEOUT_S))
        return [list(answer.get("output_ids") or []) for answer in answers]

    def prompts(self, batch_size: int, prompt_tokens: int) -> list[list[int]]:
        """The prompts of a batch; those of a smaller batch come first."""
        first, last = self._ids
        return [
            np.random.default_rng((self._seed, prompt_tokens, i))
            .integers(first, last + 1, prompt_tokens)
            .tolist()
            for i in range(batch_size)
        ]

    def _send(self, path: str, body: dict[str, Any] | None, timeout_s: float) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        try:
            request = urllib.request.Request(self._url + path, data, headers)  # noqa: S310 the user's own address
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:  # noqa: S310
                content: bytes = answer.read()
        except urllib.error.HTTPError as error:
            said = " ".join(error.read(500).decode(errors="replace").split())
            raise CliError(f"{self._url}{path}: refused with {error.code}: {said}") from error
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise UnreachableError(f"no SGLang server answers at {self._url}: {reason}; see --url") from error
        except ValueError as error:
            raise CliError(f"--url {self._url}: {error}, as in http://127.0.0.1:30000") from error
        return content


def is_one_token(answers: Sequence[Sequence[int]]) -> bool:
    """Whether all answers together consist of a single token id: acceptance is simulated, most likely."""
    return len({token for answer in answers for token in answer}) == 1 and max(map(len, answers)) > 8
