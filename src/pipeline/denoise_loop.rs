//! The denoising loop as the host runs it: a range of evaluations at a time.

use ndarray::{Array2, Array3};

use super::call::Call;
use super::error::{PipelineError, Result};
use super::executor::{Executor, Inputs};
use crate::models::Network;
use crate::request::Request;
use crate::runtime::{Executable, Outputs, ShardedTensor};
use crate::sampling::denoise::{MAX_STEPS, Sampler};
use crate::sampling::res2s;
use crate::tensor::Tensor;

/// The noise level of each evaluation in the programs' table, and the sampler's coefficients.
pub(super) fn evaluations(request: &Request) -> Vec<(String, Tensor)> {
    let table = |levels: &[f32]| {
        let mut levels = levels.to_vec();
        levels.resize(MAX_STEPS + 1, 0.0);
        ("sigmas".to_string(), Tensor::from(ndarray::Array1::from(levels)))
    };
    match request.sampler {
        Sampler::Euler => vec![table(&request.sigmas)],
        Sampler::Res2s => {
            let (levels, rows) = res2s::schedule(&request.sigmas);
            let at = |(i, k): (usize, usize)| rows.get(i).map_or(0.0, |row| row[k]);
            let coefficients = Array2::from_shape_fn((MAX_STEPS + 1, res2s::COEFFICIENTS), at);
            vec![table(&levels), ("coefficients".into(), coefficients.into())]
        }
    }
}

/// The denoising loop with its tables and scales: what follows from the request's sizes alone.
pub struct DenoiseLoop {
    pub(super) network: Network,
    pub(super) call: Call<'static>,
    pub(super) sampler: Sampler,
}

impl DenoiseLoop {
    /// Loads what has left the devices of its parameters since it was made.
    ///
    /// # Errors
    /// What is wrong with the files or the device.
    pub fn load(&self, executor: &mut Executor, name: &str) -> Result<()> {
        executor.prepare(name, &self.network).map(drop)
    }

    /// The compiled program.
    pub fn program(&self) -> &Executable {
        self.call.program()
    }

    /// Copies starting latents, video's and audio's tokens, to the devices, with zeros for what the sampler carries beside
    /// them: what the loop carries, in its order.
    ///
    /// # Errors
    /// The plugin's message.
    pub fn start(&self, executor: &Executor, latents: &[Tensor; 2]) -> Result<Vec<ShardedTensor>> {
        let zero = latents.each_ref().map(|t| Tensor::F32(ndarray::ArrayD::zeros(t.shape())));
        let beside = self.sampler.carried().len() - 1;
        let all: Vec<Tensor> = latents.iter().chain(zero.iter().cycle().take(2 * beside)).cloned().collect();
        self.go_on(executor, &all)
    }

    /// Copies what the loop carried before to the devices, in its order.
    ///
    /// # Errors
    /// Tensors that are not what this loop carries; the plugin's message.
    pub fn go_on(&self, executor: &Executor, carried: &[Tensor]) -> Result<Vec<ShardedTensor>> {
        let names = self.carried();
        if names.len() != carried.len() {
            return Err(PipelineError::Input(format!("{} tensors, the loop carries {}", carried.len(), names.len())));
        }
        names.iter().zip(carried).map(|(name, tensor)| executor.upload(self.program(), name, tensor)).collect()
    }

    /// What the loop carries, by the names of the program's inputs.
    fn carried(&self) -> Vec<String> {
        let kinds = self.sampler.carried().iter();
        kinds.flat_map(|kind| ["video", "audio"].map(|stream| format!("{kind}.{stream}"))).collect()
    }

    /// Copies a range of evaluations to the devices, and their noise `[evaluations, n, c]` where the sampler takes such: the
    /// same for each of `batch` videos.
    ///
    /// # Errors
    /// The plugin's message.
    pub fn steps(
        &self,
        executor: &Executor,
        begin: usize,
        end: usize,
        noise: Option<[Array3<f32>; 2]>,
        batch: usize,
    ) -> Result<Inputs<'static>> {
        let range =
            [("begin", begin), ("end", end)].map(|(n, v)| (n.to_string(), Tensor::from(ndarray::arr0(v as i32))));
        let noise = noise.into_iter().flat_map(|both| {
            ["video", "audio"].into_iter().zip(both).map(|(stream, each)| {
                let (evaluations, n, c) = each.dim();
                let rows = each.insert_axis(ndarray::Axis(1));
                let all = rows.broadcast((evaluations, batch, n, c)).map(|a| a.into_owned()).unwrap_or_default();
                (format!("noise.{stream}"), Tensor::from(all))
            })
        });
        executor.give_all(self.program(), Inputs::default(), range.into_iter().chain(noise))
    }

    /// Runs the evaluations of a range on what [`prepare`] gave. The program takes over the memory of what is carried.
    ///
    /// # Errors
    /// The plugin's message.
    pub fn run(
        &self,
        executor: &Executor,
        prepared: &Outputs,
        steps: &Inputs,
        carried: Vec<ShardedTensor>,
    ) -> Result<Vec<ShardedTensor>> {
        let names = self.carried();
        let find = |name: &str| match names.iter().position(|n| n == name) {
            Some(at) => carried.get(at),
            None => steps.get(name).or_else(|| self.call.input(name)).or_else(|| prepared.get(name)),
        };
        let mut outputs = executor.run_with(self.program(), find)?;
        let take = |name: &String| {
            outputs.take(name).ok_or_else(|| PipelineError::Input(format!("the loop returned no '{name}'")))
        };
        names.iter().map(take).collect()
    }
}
