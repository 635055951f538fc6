"""Write the batch script that starts a run under Slurm: one job, one step, one agent on every node, spares included.

Why each line is there, by tests on real clusters (Slurm 22.05 and 24.11):

* ``--no-kill`` for the job and the step: a lost node must not end the others, whose fleet re-forms in under a second.
* ``--overlap``: after a node was lost, a step without it waits for ever for resources that are gone.
* ``--signal=B:TERM@N``: only the batch shell gets a signal N seconds before the time limit, and has the fleet save and stop.
  At preemption Slurm sends SIGTERM to all tasks instead, and kills them after the partition's GraceTime (else KillWait): the leading agent has
  the fleet save, the others wait for it. A run that has stopped so is queued again by its own script, and continues with the same bits.
* A job with ``--no-kill`` lives on without its first node too, though the batch shell and srun are lost with it (slurmctld's
  ``kill_running_job_by_node_name``; tried with 22.05): another node leads the fleet, and the last wrapper of an agent ends the job or queues it again,
  as the batch shell would have. Slurm itself would keep its nodes until the time limit.
* ``--export=ALL`` for the step: where sbatch is set to export nothing (as some sites do), srun would keep from the agents what the script exports.
* ``--requeue``: if a first node that was lost comes back before Slurm has missed it, Slurm starts the whole job again, from the newest checkpoint.
* The job's comment names the run directory, so that a second submission of the run is noticed, and ``phalanx runs`` finds it.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator

from phalanx.launch.engines.order import (
    FOLDER,
    EngineError,
    LaunchOrder,
    exports_of,
    port_in_shell,
    seconds_of,
    slurm_time,
)
from phalanx.launch.engines.slurm_options import options_in, refuse
from phalanx.process.exit_codes import EXIT_REFUSED, EXIT_STOPPED
from phalanx.run.read import launch_variables

COMMENT, JOINING_COMMENT = "phalanx:", "phalanx-joining:"
"""Begin the comment of a job, before its run directory: of one that trains a run, and of one whose nodes join the fleet of another."""
RETURNED = "returned"
"""A folder of this name is made by who gives borrowed nodes back, so that it happens once."""
_IN_VAIN = 3
"""Jobs whose time was up and that have saved nothing, after which the run is not queued again."""
_LAST_WORDS_S, _COPIES_S = 30, 600
"""Seconds after the end of a fleet in which the first node may report, and further ones in which other agents may still copy to a store."""


def batch_script(order: LaunchOrder) -> str:
    """Return the script for ``sbatch``: header, then the batch shell. Raises ``EngineError`` for fields that
    contradict it or sbatch cannot read.

    Slurm sends the batch shell SIGTERM ``launch.grace_s`` before the time limit.
    """
    own = {
        "job-name": _job_name(order),
        "nodes": str(order.all_nodes),
        "output": _log(order, "job"),
        "comment": f"{COMMENT}{order.run_dir}",
        "signal": f"B:TERM@{math.ceil(order.launch.grace_s)}",
    }
    return "\n".join([*_header(order, own), "", *_body(order), ""])


def joining_script(order: LaunchOrder, nodes: int) -> str:
    """Return the script of a job whose ``nodes`` join the fleet of a run that trains: allocations cannot grow,
    fleets can.

    At its time limit or when preempted, its agents get SIGTERM and leave the fleet at a step boundary. Raises
    ``EngineError`` as ``batch_script``, and for options that name the nodes.
    """
    own = {
        "job-name": f"{_job_name(order)}-joining",
        "nodes": str(nodes),
        "output": _log(order, "joining"),
        "comment": f"{JOINING_COMMENT}{order.run_dir}",
        "signal": f"TERM@{math.ceil(order.launch.grace_s)}",
    }
    for option in order.launch.options:
        if named := {"nodelist", "nodefile"} & set(options_in(option)):
            raise EngineError(
                f"launch.options: {option}: the run's own job has these nodes, and a second one would wait for them (--{min(named)}): start "
                f"phalanx agent --run {order.run_dir} on those that are to join"
            )
    agent = f"{shlex.join(order.program)} agent --run {shlex.quote(str(order.run_dir))}"
    step = f"exec srun --export=ALL --no-kill --overlap --kill-on-bad-exit=0 --ntasks-per-node=1 --label{_container(order)} {agent}"
    verified = _joining_verified(order, shlex.join(order.program))
    return "\n".join([*_header(order, own), "", *_environment(order), *verified, step, ""])


def _header(order: LaunchOrder, own: dict[str, str]) -> Iterator[str]:
    """Yield the shebang and ``#SBATCH`` lines: ``own`` options, those of ``[launch]``, no-kill, requeue, and the
    user's options.

    Empty values are left out. Raises ``EngineError`` for an option that contradicts the launcher or cannot be
    quoted.
    """
    launch = order.launch
    yield "#!/bin/bash"
    options = {
        **own,
        "ntasks-per-node": "1",
        "chdir": str(order.working_dir),
        "open-mode": "append",
        "partition": launch.partition,
        "account": launch.account,
        "qos": launch.qos,
        "time": slurm_time(seconds_of(launch.time_limit)) if launch.time_limit else "",
        "constraint": launch.constraint,
        "reservation": launch.reservation,
        "exclude": launch.exclude,
        "gpus-per-node": str(order.gpus_per_node) if order.gpus_per_node else "",
    }
    for name, value in options.items():
        if value:
            yield f"#SBATCH --{name}={_quoted(name, value)}"
    yield from (f"#SBATCH --{flag}" for flag in ("no-kill", "requeue"))
    if launch.exclusive:
        yield "#SBATCH --exclusive"
    for option in launch.options:
        refuse(option)
        yield f"#SBATCH {option}"


def _job_name(order: LaunchOrder) -> str:
    """The name of a run's job, without what parts the columns of squeue's answer."""
    return f"phalanx-{order.name}".replace("|", "_")


def _log(order: LaunchOrder, name: str) -> str:
    """Return the path of a job's log as a pattern of sbatch, with the job's number. Raises ``EngineError`` for a
    backslash in it.
    """
    if "\\" in str(order.folder):
        raise EngineError(
            f"run_dir: {order.run_dir} holds a backslash, with which sbatch reads no %j: give another"
        )
    return f"{str(order.folder).replace('%', '%%')}/{name}-%j.log"


def _quoted(name: str, value: str) -> str:
    """Return the value as sbatch reads it in a script, in quotes if it has spaces, # or '.

    Raises ``EngineError`` for a line break or a double quote.
    """
    if "\n" in value or '"' in value:
        raise EngineError(
            f"launch: --{name}={value!r} holds a line break or a quote, which sbatch cannot read"
        )
    value = value.replace("\\", "\\\\")
    return f'"{value}"' if any(letter.isspace() or letter in "#'" for letter in value) else value


def _environment(order: LaunchOrder) -> Iterator[str]:
    """Yield the lines that export variables, check that private ones are set, and run the prologue.

    Raises ``EngineError`` for ``#SBATCH`` in the prologue.
    """
    launch = order.launch
    yield "# Written by phalanx submit, which also freezes the run file for it: without that, sbatch alone starts nothing."
    yield "export PYTHONUNBUFFERED=1"
    yield from exports_of(launch)
    for name, value in launch_variables(launch):
        if (
            value is None
        ):  # sbatch exports the variables that phalanx submit has set, unless --export prevents it
            yield f': "${{{name}:?launch.environment names it, and sbatch has not handed it on (--export)}}"'
    for line in launch.prologue:
        if line.lstrip().startswith("#SBATCH"):
            raise EngineError(
                f"launch.prologue: {line}: Slurm reads such lines at the top alone: launch.options"
            )
        yield line


def _container(order: LaunchOrder) -> str:
    """Return the options of srun for a container (Pyxis), with a space before them; empty for none. Raises ``EngineError`` for
    mounts without one."""
    image, mounts = order.launch.container_image, ",".join(order.launch.container_mounts)
    if mounts and not image:
        raise EngineError(
            f"launch.container_mounts: {mounts}: there is no container to see them: launch.container_image, or take them out"
        )
    if not image:
        return ""
    return f" --container-image={shlex.quote(image)}" + (
        f" --container-mounts={shlex.quote(mounts)}" if mounts else ""
    )


def _body(order: LaunchOrder) -> Iterator[str]:
    """Yield the lines of the batch shell: choose a port, verify the nodes, start an agent on each, and wait.

    At the end it queues the job again or gives borrowed nodes back. A run that was cancelled meanwhile is not
    started.
    """
    phalanx = shlex.join(order.program)
    folder, run_dir = shlex.quote(str(order.folder)), shlex.quote(str(order.run_dir))
    yield from _environment(order)
    if order.port:
        yield f'head="$(hostname):{order.port}"'
    else:
        yield 'head="$(hostname):$('  # a shell of its own: the names are not those that a prologue may have exported
        yield from (f"  {line}" for line in port_in_shell("SLURM_JOB_ID"))
        yield '  echo "$port"'
        yield ')"'
    yield f"nonce={folder}/nonce"
    yield f"rm -rf {folder}/at-work {folder}/concluded"
    # The run may be cancelled at the moment at which its job is queued again.
    yield f'if [ -n "${{SLURM_RESTART_COUNT:-}}" ] && [ -e {folder}/stopped ]; then'
    yield '  echo "the run was cancelled: the job is not queued again"'
    yield from (f"  {line}" for line in _given_back(order))
    yield "  exit 0"
    yield "fi"
    yield f'[ -n "${{SLURM_RESTART_COUNT:-}}" ] || rm -f {folder}/saved-nothing-since {folder}/stopped'
    yield f'rm -f {folder}/lead-exit; echo "$SLURM_JOB_ID.${{SLURM_RESTART_COUNT:-0}}" > "$nonce"'
    yield from _verified(order, phalanx)
    yield from _on_grace(order, phalanx, run_dir)
    agent = [
        f"{phalanx} agent --run {shlex.quote(str(order.run_file))}",
        '--coordinator "$head"',
    ]
    yield (
        "srun --export=ALL --no-kill --overlap --kill-on-bad-exit=0 --ntasks-per-node=1 --label"
        f'{_container(order)} bash -c "$on_node" "$nonce" {" ".join(agent)} &'
    )
    yield "step=$!"
    # A trapped signal ends `wait` early.
    yield 'wait "$step"; code=$?'
    yield 'while kill -0 "$step" 2>/dev/null; do wait "$step"; code=$?; done'
    yield "trap : TERM"  # nothing is left to be saved when Slurm ends a job that it has queued again
    yield from _queued_again(order)
    yield from _given_back(order)
    yield from _nobody_joins(f"${{nonce%/{FOLDER}/nonce}}")
    yield 'exit "$code"'


def _queued_again(order: LaunchOrder) -> Iterator[str]:
    """Yield the lines that queue the job again if its run was saved for now, and not cancelled or stopped for
    good.

    Not after three jobs in a row that used up their time limit without a new checkpoint: that ends with an
    error and 67.
    """
    folder, checkpoints = shlex.quote(str(order.folder)), shlex.quote(str(order.run_dir / "checkpoints"))
    # A cancelled job is not in state RUNNING; phalanx cancel and phalanx fleet stop write the file ``stopped``.
    yield f'if [ "$(cat {folder}/lead-exit 2>/dev/null)" = {EXIT_STOPPED} ] && [ ! -e {folder}/stopped ] &&'
    yield '    [ "$(squeue -h -j "$SLURM_JOB_ID" -o %T)" = RUNNING ]; then'
    yield "  in_vain="
    if order.launch.time_limit:
        least_s = max(0, int(seconds_of(order.launch.time_limit) - order.launch.grace_s) - 60)
        # One line for each job that used up its time since the newest checkpoint; a job that was preempted earlier does not count.
        yield f'  saved="$(ls {checkpoints} 2>/dev/null | cksum)"'
        yield f'  [ "$saved" = "$(tail -n 1 {folder}/saved-nothing-since 2>/dev/null)" ] || rm -f {folder}/saved-nothing-since'
        yield f'  [ "$SECONDS" -lt {least_s} ] || echo "$saved" >> {folder}/saved-nothing-since'
        yield f'  if [ "$(grep -c . {folder}/saved-nothing-since 2>/dev/null)" -gt {_IN_VAIN} ] 2>/dev/null; then'
        yield (
            f'    echo "error: at least {_IN_VAIN} jobs in a row were over before the run had saved a step: its start takes longer than launch.time_limit = '
            f'{order.launch.time_limit} leaves beside launch.grace_s = {order.launch.grace_s:g}; submit it again with a longer --time" >&2; in_vain=1; code=67'
        )
        yield "  fi"
    # If the job ends here, borrowed nodes are returned below.
    yield '  if [ -z "$in_vain" ]; then'
    yield '    echo "the run has saved; it is queued again"'
    # If the job is queued again, it keeps its borrowed nodes. Slurm then sends SIGTERM, which scontrol ignores until its
    # request is done, and which ends the sleep.
    yield '    ( trap "" TERM; exec scontrol requeue "$SLURM_JOB_ID" ) && { sleep 60; exit "$code"; }'
    yield "  fi"
    yield "fi"


def _given_back(order: LaunchOrder) -> Iterator[str]:
    """Yield the line that lets the run that has lent nodes have as many again, once; nothing if no nodes were lent."""
    if order.taken_from is not None:
        lender, returned = shlex.quote(str(order.taken_from)), shlex.quote(str(order.folder / RETURNED))
        yield f"! mkdir {returned} 2>/dev/null || {shlex.join(order.program)} fleet grow {lender} --by {order.taken} || true"


def _nobody_joins(run_dir: str) -> Iterator[str]:
    """Yield the lines that cancel waiting jobs whose nodes were to join a run that is over.

    ``run_dir`` is an expression of the shell's.
    """
    yield f'joining="{JOINING_COMMENT}{run_dir}"'
    yield 'squeue -h --me -t PENDING -o "%i|%k" | while IFS="|" read -r id comment; do'
    yield '  [ "$comment" != "$joining" ] || scancel "$id"'
    yield "done"


def _verified(order: LaunchOrder, phalanx: str) -> Iterator[str]:
    """Yield the lines that price the nodes that Slurm gave, into the price file, while the run starts.

    If ``launch.most_lost_ms`` limits the loss, they run before the start and end the job with 66 beyond it. Nodes
    without a price are taken.
    """
    limit_ms, price_file = order.launch.most_lost_ms, shlex.quote(str(order.price_file))
    words = f'{phalanx} place {shlex.quote(str(order.run_file))} --topology slurm --allocation "$SLURM_JOB_NODELIST"'
    yield f"rm -f {price_file}"
    if not limit_ms:
        yield f"( {words} > {price_file} 2>&1 ) &"
        return
    yield f"{words} --most-lost-ms {limit_ms:g} > {price_file} 2>&1; verdict=$?; cat {price_file}"
    yield f'if [ "$verdict" = {EXIT_REFUSED} ]; then'
    yield f'  echo "error: these nodes lose more of a step than launch.most_lost_ms = {limit_ms:g}: submit again for others, or allow more" >&2; exit 66'
    yield "fi"


def _joining_verified(order: LaunchOrder, phalanx: str) -> Iterator[str]:
    """Yield the lines that price the fleet with the nodes of a joining job, while these join.

    If ``launch.most_lost_ms`` limits the loss, they run before and end the job with 66 beyond it.
    """
    limit_ms, run_dir = order.launch.most_lost_ms, shlex.quote(str(order.run_dir))
    price_file = f'{shlex.quote(str(order.folder))}/given-"$SLURM_JOB_ID"'
    words = (
        f"{phalanx} place {shlex.quote(str(order.run_file))} --topology slurm "
        f'--allocation "$SLURM_JOB_NODELIST" --joining {run_dir}'
    )
    if not limit_ms:
        yield f"( {words} > {price_file} 2>&1 ) &"
        return
    yield f"{words} --most-lost-ms {limit_ms:g} > {price_file} 2>&1; verdict=$?; cat {price_file}"
    yield f'if [ "$verdict" = {EXIT_REFUSED} ]; then'
    yield f'  echo "error: with these nodes the fleet loses more of a step than launch.most_lost_ms = {limit_ms:g}: they do not join it" >&2; exit 66'
    yield "fi"


def _concluded(order: LaunchOrder) -> Iterator[str]:
    """Yield lines, within single quotes, that a node runs after its agent if the first node, which ends the job,
    was lost.

    Once no agent is at work and the run is over, one node ends the job, or queues it again if the run is to
    continue. While a coordinator still writes fleet.json, the node was only given back. Times are those of the file
    system.
    """
    yield 'grep -Eq ".reign.: *([2-9]|[1-9][0-9])" "${folder%/*}/fleet.json" || exit "$code"'
    yield f"for waited in $(seq {_LAST_WORDS_S + _COPIES_S}); do"
    yield f'  [ "$waited" -ne {_LAST_WORDS_S // 2} ] || : > "$folder/ended-$SLURMD_NODENAME"'
    yield '  [ ! -e "$folder/lead-exit" ] || exit "$code"'
    yield f'  [ "$waited" -lt {_LAST_WORDS_S} ] || [ -n "$(ls "$folder/at-work")" ] || break'
    yield "  sleep 1"
    yield "done"
    yield 'grep -Eq ".phase.: *.(finished|failed)" "${folder%/*}/fleet.json" || [ ! "${folder%/*}/fleet.json" -nt "$folder/ended-$SLURMD_NODENAME" ] || exit "$code"'
    yield 'mkdir "$folder/concluded" 2>/dev/null || exit "$code"'
    yield 'if [ -e "$folder/stopped" ] || [ -e "${folder%/*}/result.json" ] || grep -Eq ".phase.: *.failed" "${folder%/*}/fleet.json"; then'
    yield from ("  " + line.replace("'", "'\\''") for line in _given_back(order))
    yield from (f"  {line}" for line in _nobody_joins("${folder%/*}"))
    yield '  scancel "$SLURM_JOB_ID"'
    yield "else"
    yield '  scontrol requeue "$SLURM_JOB_ID"'
    yield "fi"
    yield 'exit "$code"'


def _on_grace(order: LaunchOrder, phalanx: str, run_dir: str) -> Iterator[str]:
    """Yield the trap by which the batch shell saves the run at SIGTERM, and the shell variable with the lines that
    each node runs around its agent.

    A node first waits up to a minute for the first node's file in the run directory, else exits with 65. The first
    node records its agent's exit code; the others mark that they are at work.
    """
    yield "told="  # a second signal would end agents that still save after the first
    yield "save_and_end() {"
    yield f'  echo "the job ends soon (time limit, preemption or phalanx cancel; launch.grace_s = {order.launch.grace_s:g}): the run saves"'
    yield f'  {phalanx} fleet stop --for-now {run_dir} || {{ echo "there is no fleet to be saved (yet): the job ends"; [ -n "$told" ] || {{ kill -TERM "$step" && told=1; }}; }}'
    yield "}"
    yield "trap save_and_end TERM"
    yield "on_node='"
    yield "for _ in $(seq 60); do"
    yield '  if [ "$(cat "$0" 2>/dev/null)" = "$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}" ]; then'
    yield '    folder="${0%/*}"; trap : TERM'
    yield '    if [ "$SLURM_NODEID" = 0 ]; then "$@"; code=$?; echo "$code" > "$folder/lead-exit"; exit "$code"; fi'
    yield '    mkdir -p "$folder/at-work"; : > "$folder/at-work/$SLURMD_NODENAME"'
    yield '    "$@"; code=$?'
    yield '    rm -f "$folder/at-work/$SLURMD_NODENAME"'
    yield from (f"    {line}" for line in _concluded(order))
    yield "  fi"
    yield "  sleep 1"
    yield "done"
    yield (
        'echo "error: node $SLURMD_NODENAME does not see $0 as the first node wrote it: the run directory must be on storage that all nodes '
        'share" >&2; exit 65'
    )
    yield "'"
