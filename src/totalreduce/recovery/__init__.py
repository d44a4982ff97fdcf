"""A job that outlives its processes: which processes form it, and how they come to one state after a loss.

A *seat* is the rank that the launcher gave a process. A process that is started in place of another one gets the same
seat, and the next *incarnation* of it. An *epoch* is the time in which the same processes form the group of the job;
messages call it a *membership*, because to users an epoch is a pass over the data. When a rank is lost, the group of
the epoch ends on all ranks; the processes that are left decide on the members of the next epoch. A *block* is the
smallest part of a program that takes effect on all ranks or on none, in training one step; the *version* of the state
is the number of blocks that took effect. Before a block changes anything that cannot be undone, all ranks *vote*: the
vote passes when every rank has come to it.

The modules, from the plain objects to the processes: ``membership`` (the rules of the decision), ``assembly`` (the
decision through a store), ``accusation`` (what processes write into the store about silent processes),
``launcher_store`` (the connection to it), ``keeper`` (the process that serves it), ``dealing``, ``sampler`` and
``stream`` (which rank trains on which samples), ``state`` (what is recovered), ``buffers`` (copies of the model's
buffers), ``optimizers`` (of which a block steps one), ``vote`` (the vote of a block), ``replicas`` (copies of the state
that each rank has for itself), ``snapshots`` (the state on disk), ``wishes`` (what a rank asks of all ranks between two
steps), ``epochs`` (from the group of one epoch to that of the next), ``sharing`` (one state on all ranks of a group),
``blocks`` (the blocks of a loop), ``job`` (what users call). See docs/recovery.md and docs/design/0012-recovery.md.

For programs that the library runs again from a place of their own, with a new group: ``runs`` (the groups, one after
the other) and ``attempts`` (what users call, for DistributedDataParallel and FSDP2). For a model that FSDP2 shards:
``parts`` (what one rank has of a state), ``resharding`` (which rank sends which elements), ``copies`` (the parts in the
memory of other ranks). See docs/design/0014-sharded-state.md.

For loops of collectives and checkpoints: ``replay`` (the rules of a log of results), ``routing`` (who sends what to
whom), ``checkpoint`` (the values that are saved), ``replayed`` (what users call). See docs/design/0015-replay.md.
"""
