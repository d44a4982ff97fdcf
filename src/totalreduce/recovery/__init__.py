"""A job that outlives its processes: which processes form it, and how they come to one state after a loss.

A *seat* is the rank that the launcher gave a process. A process that is started in place of another one gets the same
seat, and the next *incarnation* of it. An *epoch* is one membership: the processes that form a group, in order. When a
rank is lost, the group of the epoch ends on all ranks; the processes that are left decide on the members of the next
epoch. A *block* is the smallest part of a program that takes effect on all ranks or on none, in training one step; the
*version* of the state is the number of blocks that took effect. Before a block changes anything that cannot be undone,
all ranks *vote*: the vote passes when every rank has come to it.

The modules, from the plain objects to the processes: ``membership`` (the rules of the decision), ``assembly`` (the
decision through a store), ``launcher_store`` (the connection to it), ``keeper`` (the process that serves it),
``dealing``, ``sampler`` and ``stream`` (which rank trains on which samples), ``state`` (what is recovered),
``optimizers`` (of which a block steps one), ``replicas`` (copies of the state that each rank has for itself),
``snapshots`` (the state on disk), ``forming`` (the group of an epoch, and one state on its ranks), ``job`` and
``attempts`` (what users call). See docs/recovery.md and docs/design/0012-recovery.md.

For programs without blocks: ``replay`` (the rules of a log of results), ``routing`` (who sends what to whom),
``checkpoint`` (the values that are saved), ``replayed`` (what users call). See docs/design/0015-replay.md.
"""
