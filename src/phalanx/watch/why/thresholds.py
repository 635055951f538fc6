"""From where on something is wrong: every limit that the rules compare with, and why it is there.

They are chosen so that a healthy run has no reason in any second of it: a false alarm at night costs more than an alarm a minute later.
"""

STALL_STEPS = 10
"""Usual steps without a new one: the fleet's own diagnosis of a hang begins there too (``fleet.stall_s``)."""
STALL_LEAST_S = 30.0
"""A step of a tiny model takes milliseconds; a page fault, a slow disk or a busy neighbor takes seconds."""
START_PATIENCE_S = 900.0
"""From the start of an attempt to its first step: reading a large checkpoint and compiling take minutes."""
WORK_PATIENCE_S = 600.0
"""For an evaluation or the end of a run, whose usual time is not known yet: what a checkpoint's commit may take (``checkpoint.timeout_s``)."""
WORK_TIMES = 5
"""Times the usual seconds of an evaluation or a save, after which it counts as stuck."""
FLEET_PATIENCE_S = 60.0
"""For a fleet to form or to come together again: ten times its usual seconds."""
RECOVERING_S = 300.0
"""A loss of a node is over with when the fleet has trained that long without it, if a spare took its place."""
COORDINATOR_SILENT_S = 15.0
"""The coordinator writes fleet.json every second or two; a local launcher starts a lost one again within seconds."""
SILENT_ELSEWHERE_S = 300.0
"""Without a word from a run on another machine, of which nobody here can tell whether its processes are there."""
NEW_STEPS = 10
"""The first logged steps of an attempt are not judged: allocations, compilation and cold caches are in them."""
RECENT_STEPS = 20
"""Logged steps whose median is "now"."""
DATA_SHARE = 0.1
"""Part of the time of steps spent waiting for samples. A healthy loader is ahead and waits for none; `phalanx status` tells from 1 % on."""
SLOWER = 0.15
"""Part of the run's own earlier throughput that is lost. Clocks and networks move by a few percent."""
SLOWER_DEVIATIONS = 3.0
"""How many deviations of its own variation, from one stretch of steps to the next, it must have fallen as well."""
PAST_STEPS = 100
"""Logged steps that it takes to know what is usual, and how much it varies: five stretches."""
GOODPUT = 0.8
"""Llama 3 had 0.9 on 16,384 GPUs (arXiv 2407.21783, section 3.3.4); below this the cause is worth a look."""
GOODPUT_AFTER_S = 1800.0
"""Starting costs a short run most of its time, and is nothing wrong."""
DISK_NEXT = 1.1
"""Times the size of a checkpoint that must be free: the next one is written before the oldest goes."""
DISK_SHARE = 0.03
"""Free part of the disk below which it counts as filling, if that is also less than ten checkpoints."""
DISK_CHECKPOINTS = 10
CHECKPOINT_INTERVALS = 3
"""Intervals without a checkpoint: one is being written, one is due, and one is missing."""
CHECKPOINT_LEAST_S = 120.0
"""For checkpoints that are due every few seconds and written to a slow disk."""
SPIKE_WINDOWS = 1
"""A spike is news until as many windows (``train.spike_window``) of steps have been trained since."""
NEWS_S = 600.0
"""... and for ten minutes at least: a window of a small model is over in seconds, and nobody looks as soon as that. The alert lasts as long."""
BACK = 0.1
"""The loss is back if it is at most this part above what was usual before the spike."""
RISEN = 0.5
"""Part by which the loss must be above the run's best for a window of steps to count as diverged. Spikes of single steps are another rule's."""
SKEW_S = 5.0
"""Between two clocks that wrote one stream. With NTP machines are within milliseconds; leases and the order of logs suffer from seconds."""
IMBALANCE = 0.6
"""Part of the largest imbalance that a router can have (all tokens to the same experts), once it had time to learn."""
IMBALANCE_AFTER_STEPS = 200
BURST_WINDOWS = 0.3
"""Part of the windows in which a rank must be slower to be late in bursts, which a median over all windows does not show."""
BURST_ALONE = 3.0
"""Times the time that its peers wait for the next rank: on a machine with neighbors all ranks are late at times."""
SLOW_RANK = 0.2
"""Part by which a rank computes longer than its peers; noise of shared machines is below."""
