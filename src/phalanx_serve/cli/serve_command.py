"""``phalanx serve``: a run's model behind OpenAI's HTTP interface."""

from __future__ import annotations

import click

from phalanx.command import command_options
from phalanx.run.directory.paths import is_published
from phalanx_serve.cli.service.options import (
    ServeOptions,
    another_machine,
    require_consistent,
    require_stage_options,
    served_run,
)
from phalanx_serve.cli.service.start import Said, join_stages, make_key, start


@click.command("serve")
@command_options(ServeOptions)
def command(options: ServeOptions) -> None:
    """Serve the model of PLACE, a run directory, a pack or a folder of Hugging Face: /v1/completions, /v1/chat/completions, /v1/models, /health,
    /ready, /metrics.

    Ctrl-C or SIGTERM takes nothing new and finishes what goes on; a second one ends. Prompts are not logged.

    \b
      phalanx serve runs/quickstart-1f3a9c04
      phalanx serve runs/quickstart-1f3a9c04 --workers prefill:1,decode:2
      phalanx serve runs/quickstart-1f3a9c04 --workers prefill:1,decode:2 --pages nixl
      phalanx serve runs/quickstart-1f3a9c04 --numerics fast --device cuda --memory 20GiB --dtype bfloat16
      phalanx serve Llama-3.1-8B --numerics fast --dtype bfloat16
      phalanx serve model.pack --stream --memory 8GiB
      phalanx serve runs/quickstart-1f3a9c04 --pipeline 2
      phalanx serve runs/quickstart-1f3a9c04 --tensor 2
      phalanx serve --new-key keys.txt --key-name alice --key-limits requests=60,concurrent=4
      phalanx serve runs/quickstart-1f3a9c04 --host 0.0.0.0 --key-file keys.txt
    """
    if options.new_key is not None:
        return make_key(options.new_key, options.key_name, options.key_limits)
    if options.key_name or options.key_limits:
        raise click.UsageError("--key-name and --key-limits are for --new-key FILE")
    run_dir = options.run_dir
    if run_dir is None:
        raise click.UsageError("give a run directory, a pack, or a folder of Hugging Face")
    if options.join or options.stages_at or options.token_file:
        require_stage_options(options)
    if options.join and is_published(run_dir):
        raise click.UsageError(f"--join: {another_machine(run_dir)}")
    if options.join and options.token_file:
        return join_stages(run_dir, options.join, options.token_file)
    require_consistent(options, run_dir)
    return start(options, served_run(options, run_dir), Said(options.as_json))
