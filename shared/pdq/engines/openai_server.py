"""`python -m pdq.engines.openai_server`: vLLM's own OpenAI server, with vLLM's own options.

vLLM's command asks for packages that no engine needs and that pdq's locks leave out: it is started without the routes
for SageMaker where their package is missing.
"""

from __future__ import annotations

import importlib.util

SAGEMAKER = "model_hosting_container_standards"


def main() -> None:
    """Serve until a signal comes."""
    from vllm.entrypoints.launchers.api_server.entry import main as serve

    if importlib.util.find_spec(SAGEMAKER) is None:
        _leave_out_sagemaker()
    serve()


def _leave_out_sagemaker() -> None:
    from vllm.entrypoints.launchers import app
    from vllm.entrypoints.serve.sagemaker import api_router

    api_router.attach_router = lambda *_args, **_named: None
    app.sagemaker_standards_bootstrap = lambda made: made


if __name__ == "__main__":
    main()
