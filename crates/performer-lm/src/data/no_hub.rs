//! This module stands in for `hub` where this crate is built without the feature of that name.

use std::path::PathBuf;

use anyhow::{Result, bail};

use super::corpus::TinyStories;
use crate::listener::Listener;

/// The hub, of which there is none.
pub(crate) enum Hub {}

impl Hub {
    /// Refuses to configure a hub.
    ///
    /// # Errors
    /// Always; the error names the feature that is missing.
    pub(crate) fn from_env() -> Result<Self> {
        bail!(
            "this build does not ask the Hugging Face hub or read its cache: build performer-lm with the feature `hub`, or give a file \
             or folder"
        )
    }

    pub(crate) fn cached(&self) -> Option<TinyStories> {
        match *self {}
    }

    pub(crate) fn tinystories(&self, _: &dyn Listener) -> Result<TinyStories> {
        match *self {}
    }

    pub(crate) fn model(&self, _id: &str, _: &dyn Listener) -> Result<PathBuf> {
        match *self {}
    }
}
