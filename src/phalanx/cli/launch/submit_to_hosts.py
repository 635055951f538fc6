"""``phalanx submit`` on machines without a scheduler: hosts through ssh, or this one."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from phalanx.launch.engines import bare
from phalanx.launch.engines.hosts import HERE, Host, read_hosts, start_script
from phalanx.launch.engines.order import LaunchOrder
from phalanx.launch.engines.standing import refuse_second
from phalanx.launch.engines.submission import order_of, read_record, record, refuse_finished, write_files
from phalanx.launch.engines.tools import EngineError
from phalanx.run.spec import RunSpec

_THIS_MACHINE = Host("this-machine", HERE, 0, "127.0.0.1")


def submit_to_hosts(spec: RunSpec, working_dir: Path, *, dry_run: bool, as_json: bool) -> None:
    """Starts a run on its hosts, and leaves it to itself. Raises ``EngineError`` with everything that keeps it from starting."""
    order, engine = order_of(spec, working_dir), spec.launch.engine
    hosts = [_THIS_MACHINE] if engine == "local" else _hosts_of(order)
    scripts = {host.name: start_script(order, host, hosts[0], "WORD") for host in hosts}
    if dry_run:
        shown = "\n".join(f"# on {name}\n{script}" for name, script in scripts.items())
        click.echo(
            json.dumps({"scripts": scripts, "run_dir": spec.run_dir}) if as_json else shown, nl=as_json
        )
        return
    refuse_finished(order)
    refuse_second(order.run_dir, read_record(order.run_dir))
    wrong = bare.preflight(order, hosts)
    if wrong:
        raise EngineError("this run cannot start:\n  " + "\n  ".join(wrong))
    write_files(order, spec, scripts[hosts[0].name])
    bare.start(order, hosts)
    where = "this machine" if engine == "local" else f"{len(hosts)} hosts"
    made = record(order, engine, where, hosts[0].name)
    if as_json:
        click.echo(json.dumps({**asdict(made), "run_dir": str(order.run_dir)}))
        return
    click.echo(f"started on {where}, and needs this terminal no more; run directory {order.run_dir}")
    click.echo(
        f"follow it with  phalanx status {order.run_dir}  |  phalanx logs {order.run_dir} --follow  |  phalanx cancel {order.run_dir}"
    )


def _hosts_of(order: LaunchOrder) -> list[Host]:
    """As many of the hosts in the file as the run needs, spares included; all of them if there are fewer."""
    path = order.launch.hosts
    if not path:
        raise EngineError("which hosts? --hosts FILE, or launch.hosts in the run file")
    try:
        hosts = read_hosts((order.working_dir / path).read_text())
    except OSError as error:
        raise EngineError(f"launch.hosts: cannot read {path}: {error.strerror}") from error
    if not hosts:
        raise EngineError(f"launch.hosts: {path} names no host")
    return hosts[: order.all_nodes]
