//! The coordinator: agent and data paths.
