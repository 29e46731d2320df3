//! One process alone.

use std::{sync::Arc, time::Duration};

use crate::{Error, Ranks, Reduction, Result};

/// The one rank of a program that runs by itself.
#[derive(Clone, Copy, Debug, Default)]
pub struct One;

impl Ranks for One {
    fn rank(&self) -> usize {
        0
    }

    fn size(&self) -> usize {
        1
    }

    fn all_reduce(&self, _: &mut [f32], _: Reduction) -> Result<()> {
        Ok(())
    }

    fn all_gather(&self, part: &[u8]) -> Result<Vec<Vec<u8>>> {
        Ok(vec![part.to_vec()])
    }

    fn broadcast(&self, _: usize, _: &mut [u8]) -> Result<()> {
        Ok(())
    }

    fn exchange(&self, send: Option<(usize, &[u8])>, receive: Option<(usize, &mut [u8])>) -> Result<()> {
        match (send, receive) {
            (None, None) => Ok(()),
            (send, _) => Err(Error {
                rank: 0,
                size: 1,
                call: "exchange".into(),
                bytes: send.map_or(0, |(_, bytes)| bytes.len()),
                cause: "there is no other rank".into(),
            }),
        }
    }

    fn barrier(&self) -> Result<()> {
        Ok(())
    }

    fn split(&self, _: usize) -> Result<Arc<dyn Ranks>> {
        Ok(Arc::new(Self))
    }

    fn set_deadline(&self, _: Duration) {}

    fn abort(&self) {
        std::process::abort()
    }
}
