//! Decode steps in CUDA graphs.
//!
//! ```text
//! first step of a shape    launched: buffers grow, cuBLASLt chooses
//! second                   launched into a graph, which is replayed
//! later                    the graph is replayed; ops only count their rows
//! ```
//! A graph holds all launches from the embedding to the first op that a graph cannot hold: choosing
//! tokens, or a copy of logits. It names the addresses of weights, activations and the step's arrays;
//! when one of these moves, all graphs are forgotten. A shape of which no graph can be made is
//! launched from then on.

use super::driver::Graph;
use super::error::CudaError;
use super::launcher::Launcher;
use super::step::Shape;
use std::collections::HashMap;

/// Most graphs that are kept; each takes some memory of the device.
const MAX_GRAPHS: usize = 128;

/// What is known of a shape.
enum Entry {
    /// A step of it was launched.
    Seen,
    /// It has a graph.
    Graph(Graph),
    /// A graph of it could not be made or replayed.
    NoGraph,
}

/// The graphs, and the shapes that were seen.
#[derive(Default)]
pub(super) struct Graphs {
    entries: HashMap<Shape, Entry>,
    /// What is being launched for the first time.
    first: Option<Shape>,
    /// What is being captured.
    open: Option<Shape>,
    /// A graph failed, and the step would be launched next time.
    gave_up: bool,
}

impl Graphs {
    /// Graphs there are.
    pub fn len(&self) -> usize {
        self.entries.values().filter(|entry| matches!(entry, Entry::Graph(_))).count()
    }

    /// Forgets all, as a buffer moved.
    pub fn clear(&mut self) {
        self.entries.clear();
    }

    /// Begins a step of `shape`.
    pub fn begin(&mut self, launcher: &mut Launcher, shape: Shape) -> Result<(), CudaError> {
        match self.entries.get(&shape) {
            Some(Entry::Graph(graph)) => {
                let replayed = launcher.replay(graph);
                return self.or_give_up(shape, replayed);
            }
            Some(Entry::Seen) => {
                let begun = launcher.begin_capture();
                self.open = begun.is_ok().then_some(shape);
                return self.or_give_up(shape, begun);
            }
            Some(Entry::NoGraph) => {}
            None => self.first = Some(shape),
        }
        Ok(())
    }

    /// Before an op that no graph holds: what was captured is launched.
    pub fn end(&mut self, launcher: &mut Launcher) -> Result<(), CudaError> {
        launcher.end_replay();
        if let Some(shape) = self.first.take().filter(|_| !launcher.has_failed()) {
            if self.len() >= MAX_GRAPHS {
                self.clear();
            }
            self.entries.insert(shape, Entry::Seen);
        }
        if let Some(shape) = self.open.take() {
            let graph = launcher.end_capture().and_then(|graph| {
                launcher.replay(&graph)?;
                launcher.end_replay();
                Ok(graph)
            });
            let graph = self.or_give_up(shape, graph)?;
            self.entries.insert(shape, Entry::Graph(graph));
        }
        Ok(())
    }

    fn or_give_up<R>(
        &mut self,
        shape: Shape,
        result: Result<R, CudaError>,
    ) -> Result<R, CudaError> {
        if result.is_err() {
            self.entries.insert(shape, Entry::NoGraph);
            self.gave_up = true;
        }
        result
    }

    /// Whether a graph failed since the last call.
    pub fn take_gave_up(&mut self) -> bool {
        std::mem::take(&mut self.gave_up)
    }

    /// After a failure: nothing is being captured.
    pub fn abandon(&mut self, launcher: &mut Launcher) {
        (self.first, self.open) = (None, None);
        launcher.reset();
    }
}
