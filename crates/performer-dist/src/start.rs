//! How a program finds out that it is one of several.

use std::{env, sync::Arc, time::Duration};

use crate::{One, Ranks};

/// The environment variables by which launchers tell their processes how many they are. The first
/// of a pair shows that the launcher started this process, the second holds the number: OpenMPI,
/// then MPICH and whatever else speaks PMI, then Slurm with PMIx. Slurm sets `SLURM_NTASKS` in the
/// scripts of a job too, so `PMIX_RANK` tells that `srun` has started this process.
const SIZES: [(&str, &str); 3] =
    [("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"), ("PMI_SIZE", "PMI_SIZE"), ("PMIX_RANK", "SLURM_NTASKS")];

/// Returns the number of processes that a launcher started with this one, 1 if there was none.
pub fn launched_size() -> usize {
    let size = |(mark, size): &(&str, &str)| env::var_os(mark).and_then(|_| env::var(size).ok()?.parse().ok());
    SIZES.iter().find_map(size).unwrap_or(1).max(1)
}

/// What launchers say of the number of processes on this machine: OpenMPI, MPICH, then Slurm where
/// it was asked for so many, else what it gives the first machine, as in `4(x2),3`.
const LOCAL_SIZES: [&str; 5] = [
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "SLURM_NTASKS_PER_NODE",
    "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_TASKS_PER_NODE",
];

/// Returns the number of processes of this program on this machine, as far as the launcher says it.
pub fn local_size() -> usize {
    let size = |name: &&str| leading_number(&env::var(name).ok()?);
    if launched_size() > 1 { LOCAL_SIZES.iter().find_map(size).unwrap_or(1).max(1) } else { 1 }
}

/// The number that a text begins with.
fn leading_number(text: &str) -> Option<usize> {
    text.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}

/// What launchers say of the number of a process on its machine: OpenMPI, MPICH, Slurm.
const LOCAL_RANKS: [&str; 3] = ["OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"];

/// Returns the number of this process among those of this program on its machine, from 0, as far as
/// the launcher says it: by it, each takes a card of its own.
pub fn local_rank() -> usize {
    let rank = |name: &&str| env::var(name).ok()?.parse().ok();
    if launched_size() > 1 { LOCAL_RANKS.iter().find_map(rank).unwrap_or(0) } else { 0 }
}

/// What launchers say of the number of a process, in the order of [`SIZES`].
const RANKS: [&str; 3] = ["OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"];

/// Returns the number of this process among those that a launcher started, 0 where the launcher
/// does not say it. With it a program can keep all processes but one silent before it calls
/// [`start`].
pub fn launched_rank() -> usize {
    let rank = |name: &&str| env::var(name).ok()?.parse().ok();
    if launched_size() > 1 { RANKS.iter().find_map(rank).unwrap_or(0) } else { 0 }
}

/// Joins the processes that a launcher of MPI started with this one; without a launcher, or where
/// it started one process, this is [`One`]. Call it once, and only after the environment variables
/// of the process are set, because MPI may start threads.
///
/// # Errors
/// In words, if there are several processes and this build has no MPI, or MPI does not start, or
/// the MPI of this build does not see the others, because the launcher belongs to another one.
pub fn start(deadline: Duration) -> Result<Arc<dyn Ranks>, String> {
    match launched_size() {
        1 => Ok(Arc::new(One)),
        size => several(size, deadline),
    }
}

#[cfg(feature = "mpi")]
fn several(size: usize, deadline: Duration) -> Result<Arc<dyn Ranks>, String> {
    let ranks = crate::Mpi::start(deadline)?;
    if ranks.size() == 1 {
        return Err(format!(
            "this is one of {size} processes, but the MPI library of this build sees only this one: the launcher belongs \
             to another MPI; start it with the mpirun of the MPI that it was built with"
        ));
    }
    Ok(Arc::new(ranks))
}

#[cfg(not(feature = "mpi"))]
fn several(size: usize, _: Duration) -> Result<Arc<dyn Ranks>, String> {
    Err(format!(
        "this is one of {size} processes, and this build cannot join them: build it with --features mpi (which \
         needs an MPI library), or start it without mpirun"
    ))
}

#[cfg(test)]
mod tests {
    use super::leading_number;

    #[test]
    fn slurm_tells_the_processes_of_each_machine() {
        for (text, number) in [("4", Some(4)), ("4(x2),3", Some(4)), ("12,3", Some(12)), ("", None), ("x2", None)] {
            assert_eq!(leading_number(text), number, "{text:?}");
        }
    }
}
