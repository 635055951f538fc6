"""``phalanx submit`` on machines without a scheduler: hosts through ssh, or this one."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import click

from phalanx.hardware.tables import HardwareError
from phalanx.launch.engines import bare
from phalanx.launch.engines.hosts import HERE, Host, network_of, read_hosts, start_script
from phalanx.launch.engines.order import EngineError, LaunchOrder
from phalanx.launch.engines.standing import refuse_second
from phalanx.launch.engines.submission import (
    forget_stopped,
    how_to_follow,
    only_submission,
    order_of,
    read_record,
    recorded,
    refuse_finished,
    write_files,
)
from phalanx.launch.placing import TopologyError
from phalanx.launch.planner import PlannerError, PricedNodes, installed_planner, too_slow
from phalanx.run.directory.durable import write_atomically
from phalanx.run.directory.regular_file import read_small
from phalanx.run.spec import RunSpec

_THIS_MACHINE = Host("this-machine", HERE, 0, "127.0.0.1")


def submit_to_hosts(spec: RunSpec, working_dir: Path, *, dry_run: bool, as_json: bool) -> None:
    """Starts a run on its hosts, and leaves it to itself. Raises ``EngineError`` with everything that keeps it from starting."""
    order, engine = order_of(spec, working_dir), spec.launch.engine
    listed = [_THIS_MACHINE] if engine == "local" else hosts_in(order, order.launch.hosts)
    # As many as the run needs, spares included; all if there are fewer, which the checks then say.
    hosts = listed[: order.all_nodes] if engine == "ssh" else listed
    scripts = {host.name: start_script(order, host, hosts[0], "WORD") for host in hosts}
    if dry_run:
        _demand(bare.problems(order, hosts))
        shown = "\n".join(f"# on {name}\n{script}" for name, script in scripts.items())
        click.echo(
            json.dumps({"scripts": scripts, "run_dir": spec.run_dir}) if as_json else shown, nl=as_json
        )
        return
    where = "this machine" if engine == "local" else f"{len(hosts)} hosts"
    refuse_finished(order)
    with only_submission(order):
        spec, verdict = _verified(order, spec, engine, listed, hosts)
        write_files(order, spec, scripts[hosts[0].name])
        with recorded(order, engine, where, hosts[0].name) as made:
            bare.start(order, hosts)
    if as_json:
        lost = {} if verdict is None else {"lost_s": verdict.lost_s, "good": verdict.certified}
        click.echo(json.dumps({**asdict(made), "run_dir": str(order.run_dir), **lost}))
        return
    click.echo(f"started on {where}, and needs this terminal no more; run directory {order.run_dir}")
    if verdict is not None:
        click.echo(f"  placement: {verdict.sentence}")
    click.echo(how_to_follow(order.run_dir))


def _verified(
    order: LaunchOrder, spec: RunSpec, engine: str, listed: list[Host], hosts: list[Host]
) -> tuple[RunSpec, PricedNodes | None]:
    """A run that can start on the first ``hosts`` of those that are ``listed``, with what they are worth to it, where that is known.

    Raises ``EngineError`` with everything that keeps it from starting.
    """
    refuse_second(order.run_dir, read_record(order.run_dir))
    forget_stopped(order)
    wrong = bare.preflight(order, hosts)
    verdict, why_not = _verdict(spec, listed, hosts) if engine == "ssh" and not wrong else (None, "")
    if spec.launch.most_lost_ms and not wrong and engine == "ssh":
        wrong += filter(None, [too_slow(spec, verdict) if verdict else unpriced(spec, why_not)])
    _demand(wrong)
    if verdict is not None and not spec.launch.unit:
        launch = replace(spec.launch, unit=verdict.unit, order=verdict.order)
        spec = replace(spec, launch=launch)
    if engine == "ssh":
        told = verdict.sentence if verdict else f"not verified: {why_not}"
        try:
            write_atomically(order.given, f"{told}\n".encode())
        except OSError as error:
            raise EngineError(
                f"cannot write {order.given}: {error.strerror}; give another run_dir"
            ) from error
    return spec, verdict


def _demand(wrong: list[str]) -> None:
    if wrong:
        raise EngineError("this run cannot start:\n  " + "\n  ".join(wrong))


def _verdict(spec: RunSpec, listed: list[Host], hosts: list[Host]) -> tuple[PricedNodes | None, str]:
    """What the hosts are worth to the run in the network of all that are listed; or why that has no price."""
    try:
        return installed_planner().price_of(spec, network_of(listed), [host.name for host in hosts]), ""
    except (TopologyError, PlannerError, HardwareError) as error:
        return None, str(error)


def unpriced(spec: RunSpec, why_not: str) -> str:
    """Why hosts without a price are not used where a limit was set."""
    return f"launch.most_lost_ms = {spec.launch.most_lost_ms:g} cannot be verified: {why_not}. Or take the limit out"


def hosts_in(order: LaunchOrder, path: str) -> list[Host]:
    """The hosts in a file. Raises ``EngineError``."""
    if not path:
        raise EngineError("which hosts? --hosts FILE, or launch.hosts in the run file")
    try:
        hosts = read_hosts(read_small(order.working_dir / path, follow=True).decode("utf-8-sig"))
    except OSError as error:
        raise EngineError(f"launch.hosts: cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise EngineError(f"launch.hosts: {path} is no text: write one host a line") from error
    if not hosts:
        raise EngineError(f"launch.hosts: {path} names no host")
    return hosts
