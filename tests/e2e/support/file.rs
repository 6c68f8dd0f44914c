//! A file for one test, gone with it.

use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};

pub(crate) struct File(PathBuf);

impl File {
    /// `name` ends the file's.
    pub(crate) fn new(name: &str, text: &str) -> Self {
        static MADE: AtomicUsize = AtomicUsize::new(0);
        let (process, made) = (std::process::id(), MADE.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(format!("kvbaton-e2e-{process}-{made}-{name}"));
        std::fs::write(&path, text).unwrap();
        Self(path)
    }

    pub(crate) fn path(&self) -> &str {
        self.0.to_str().unwrap()
    }
}

impl Drop for File {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}
