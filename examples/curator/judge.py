"""Curator's judge workflow on a Rollway stack. The workflow names Curator's own classes, so
`install()` puts Rollway in place of Curator's Dynamo backend.

    source .venv-curator/bin/activate
    ROLLWAY_ENGINE_PYTHON=.venv/bin/python python examples/curator/judge.py --out judged
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

from qa import start_ray  # the example beside this one; it must be imported before Ray

# isort: split
from nemo_curator.eval.llm_judge.workflow import LLMJudgeWorkflow

from rollway.integrations.curator import install

HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", default="judged", help="a directory for the JSON lines")
    options = parser.parse_args()
    ray = start_ray(replicas=1)
    try:
        judge(options.out)
    finally:
        ray.stop()
    print(f"The judged questions are in {Path(options.out).absolute()}")


def judge(out: str) -> None:
    """Judge the questions beside this file."""
    from rollway.demo.model import build_base
    from rollway.stack.preset import cache_dir

    install()
    with tempfile.TemporaryDirectory() as directory:
        config = Path(directory, "judge.yaml")
        model = str(build_base(cache_dir() / "demo"))
        config.write_text((HERE / "judge.yaml").read_text().replace("MODEL", model, 1))
        shutil.copy(HERE / "judge.jinja", directory)
        workflow = LLMJudgeWorkflow(
            judge_config=config, input_path=str(HERE / "questions.jsonl"), output_path=out
        )
        workflow.run()


if __name__ == "__main__":
    main()
