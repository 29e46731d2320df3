//! Several processes that work on one model: the few calls that they need, and what training makes
//! of them.
//!
//! [`Ranks`] is what a process knows of the others: its number (the rank), how many there are, and
//! collective calls, each with a deadline. There are implementations for one process ([`One`]), for
//! ranks that are threads of one process ([`threads`]) and for processes under MPI (`Mpi`, with the
//! feature `mpi`). With the feature `nccl`, processes under MPI connect their cards, whose numbers
//! then go from one to the other without the processor ([`Cards`]). The rest of the crate is built
//! on [`Ranks`] alone and works with every implementation:
//!
//! - [`sum_in_order`] adds the gradients of a batch whose parts are computed by several ranks, in
//!   one order, whatever the number of ranks. So a training has the same bits on any number.
//! - [`agree`] lets all ranks fail where one fails, with one text that names it.
//! - [`Counted`] counts what is sent.
//!
//! `Mpi`, and `Card` and `Nccl` of the feature `nccl`, are compiled only with their features, which
//! need an MPI library. So docs.rs does not show them; where a library is installed,
//! `cargo doc -p performer-dist --features nccl` does.
//!
//! This is a crate of its own, which knows nothing of models: whoever uses `performer-core` for
//! attention has no calls between processes among its dependencies, and MPI is a feature of one
//! small crate.

#![deny(missing_docs)]

mod agree;
mod cards;
mod count;
mod error;
mod fold;
mod grid;
#[cfg(feature = "mpi")]
mod mpi;
#[cfg(feature = "nccl")]
mod nccl;
mod one;
mod ranks;
mod start;
mod threads;

pub use agree::{Disagreement, agree, agree_on, gather};
pub use cards::{CardMemory, Cards};
pub use count::{Counted, Traffic};
pub use error::{Error, Result};
pub use fold::sum_in_order;
pub use grid::{Grid, share};
#[cfg(feature = "mpi")]
pub use mpi::Mpi;
#[cfg(feature = "nccl")]
pub use nccl::{Card, Nccl};
pub use one::One;
pub use ranks::{Ranks, Reduction};
pub use start::{launched_rank, launched_size, local_rank, local_size, start};
pub use threads::{Thread, threads};
