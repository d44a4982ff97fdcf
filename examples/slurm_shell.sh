#!/bin/sh
# Run a command line on one node of a Slurm job, as ssh does on a host: slurm_shell.sh NODE 'command line'
#
# A job outlives the loss of a node if it was submitted with --no-kill. The exit code is then 255, which is that of ssh
# for a connection that is lost: srun itself ends with 0.
srun --overlap --quiet --unbuffered --nodes 1 --ntasks 1 --nodelist "$1" --export=ALL sh -c "$2"
code=$?
case $(sinfo --noheader --nodes "$1" --format %T) in
down* | fail* | unk* | error*) code=255 ;;
esac
exit $code
