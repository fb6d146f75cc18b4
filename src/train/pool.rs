//! Threads of a run on a CPU.

use std::{
    collections::BTreeMap,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Mutex, PoisonError,
        mpsc::{Receiver, Sender, channel},
    },
    thread,
};

use crate::model::{DeviceError, set_up_cpu};

type Job = Box<dyn FnOnce() + Send>;

/// What a thread is asked to compute.
pub(super) type Task<T> = Box<dyn FnOnce() -> Result<T, DeviceError> + Send>;

/// Threads that live as long as the run: MKL keeps buffers for every thread that it has seen.
#[derive(Debug)]
pub(super) struct Pool {
    /// `None`: the caller's thread does all the work.
    jobs: Option<Sender<Job>>,
    handles: Vec<thread::JoinHandle<()>>,
}

impl Pool {
    /// A pool of so many threads; with one, or on a GPU, work is done by the caller.
    ///
    /// # Errors
    /// [`DeviceError::NoThread`] when the operating system refuses one.
    pub(super) fn new(threads: usize) -> Result<Self, DeviceError> {
        if threads <= 1 {
            return Ok(Self { jobs: None, handles: Vec::new() });
        }
        let (jobs, queue) = channel::<Job>();
        let queue = Arc::new(Mutex::new(queue));
        let work = |queue: Arc<Mutex<Receiver<Job>>>| {
            set_up_cpu();
            // The lock is released before the job runs.
            let next = || queue.lock().unwrap_or_else(PoisonError::into_inner).recv();
            while let Ok(job) = next() {
                job();
            }
        };
        // Dropped when a thread is refused, it ends those that have started.
        let mut pool = Self { jobs: Some(jobs), handles: Vec::with_capacity(threads) };
        for n in 0..threads {
            let (thread, queue) = (thread::Builder::new().name(format!("elmo step {n}")), Arc::clone(&queue));
            pool.handles.push(thread.spawn(move || work(queue)).map_err(|error| DeviceError::no_thread(&error))?);
        }
        Ok(pool)
    }

    /// Threads that compute.
    pub(super) fn threads(&self) -> usize {
        self.handles.len().max(1)
    }

    /// Results in the order of the tasks, whichever thread computed them.
    pub(super) fn run<T: Send + 'static>(&self, tasks: Vec<Task<T>>) -> Result<Vec<T>, DeviceError> {
        let mut results = Vec::with_capacity(tasks.len());
        self.fold(tasks, |result| {
            results.push(result);
            Ok(())
        })?;
        Ok(results)
    }

    /// Takes the results in the order of the tasks. A task begins when few results wait for an earlier one: there are never
    /// more than one for each thread, and one.
    pub(super) fn fold<T: Send + 'static>(
        &self,
        tasks: impl IntoIterator<Item = Task<T>>,
        mut take: impl FnMut(T) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        let Some(jobs) = &self.jobs else {
            set_up_cpu();
            return tasks.into_iter().try_for_each(|task| take(task()?));
        };
        let gone = || DeviceError::internal("a thread of the training step ended");
        let (sender, results) = channel();
        let mut tasks = tasks.into_iter().enumerate();
        let (mut running, mut next, mut early, mut failed) = (0, 0, BTreeMap::new(), None);
        loop {
            while failed.is_none() && running + early.len() <= self.handles.len() {
                let Some((i, task)) = tasks.next() else { break };
                let sender = sender.clone();
                let job = move || {
                    let result = catch_unwind(AssertUnwindSafe(task));
                    let panicked = |_| Err(DeviceError::internal("a thread of the training step panicked"));
                    let _ = sender.send((i, result.unwrap_or_else(panicked)));
                };
                jobs.send(Box::new(job)).map_err(|_| gone())?;
                running += 1;
            }
            if running == 0 {
                return failed.map_or(Ok(()), Err);
            }
            match results.recv().map_err(|_| gone())? {
                (i, Ok(result)) => drop(early.insert(i, result)),
                (_, Err(error)) => failed = Some(error), // the others still run: their tensors are in use
            }
            running -= 1;
            while failed.is_none()
                && let Some(result) = early.remove(&next)
            {
                failed = take(result).err();
                next += 1;
            }
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.jobs = None;
        for handle in self.handles.drain(..) {
            let _ = handle.join(); // a panic was an error of its task
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        sync::atomic::{AtomicUsize, Ordering},
        time::Duration,
    };

    use tch::{Device, Kind, Tensor};

    use super::*;

    /// The first operation of its thread is a product that has other bits when MKL splits it between threads.
    #[test]
    fn a_thread_computes_its_first_product_alone() {
        let product = |_| {
            let numbers = |columns: i64| (Tensor::arange(400 * columns, (Kind::Float, Device::Cpu)) * 0.7).sin();
            let (a, b) = (numbers(10).view([400, 10]), numbers(16).view([400, 16]));
            let task = move || Ok(Vec::<f32>::try_from(a.tr().f_mm(&b)?.f_view([-1])?)?);
            Box::new(task) as Task<Vec<f32>>
        };
        let expected = Pool::new(1).unwrap().run(vec![product(0)]).unwrap();
        for _ in 0..20 {
            for found in Pool::new(4).unwrap().run((0..4).map(product).collect()).unwrap() {
                assert_eq!(found, expected[0]);
            }
        }
    }

    #[test]
    fn results_are_in_the_order_of_the_tasks_and_failures_are_errors() {
        for threads in [1, 3] {
            let pool = Pool::new(threads).unwrap();
            let squares = || (0..20_u64).map(|i| Box::new(move || Ok(i * i)) as Task<u64>).collect::<Vec<_>>();
            let expected: Vec<u64> = (0..20).map(|i| i * i).collect();
            assert_eq!(pool.run(squares()).unwrap(), expected);
            let mut tasks = squares();
            tasks[7] = Box::new(|| Err(DeviceError::internal("number seven")));
            assert!(pool.run(tasks).unwrap_err().to_string().contains("number seven"));
            assert_eq!(pool.run(squares()).unwrap(), expected, "a failure is not kept");
        }
        let pool = Pool::new(2).unwrap();
        let outcome = pool.fold((0..9_u64).map(|i| Box::new(move || Ok(i)) as Task<u64>), |i| match i {
            4 => Err(DeviceError::internal("number four")),
            _ => Ok(()),
        });
        assert!(outcome.unwrap_err().to_string().contains("number four"));
        let panics: Vec<Task<u64>> = vec![Box::new(|| panic!("a test of panics"))];
        assert!(pool.run(panics).unwrap_err().to_string().contains("panicked"));
    }

    /// The first task is the slowest, so that all others would wait for it.
    #[test]
    fn few_results_wait_for_an_earlier_one() {
        static ALIVE: AtomicUsize = AtomicUsize::new(0);
        static MOST: AtomicUsize = AtomicUsize::new(0);
        struct Counted(u64);
        impl Drop for Counted {
            fn drop(&mut self) {
                ALIVE.fetch_sub(1, Ordering::SeqCst);
            }
        }
        let pool = Pool::new(3).unwrap();
        let task = |i: u64| -> Task<Counted> {
            Box::new(move || {
                thread::sleep(Duration::from_millis(if i == 0 { 50 } else { 0 }));
                MOST.fetch_max(ALIVE.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                Ok(Counted(i))
            })
        };
        let mut taken = Vec::new();
        pool.fold((0..40).map(task), |counted| {
            taken.push(counted.0);
            Ok(())
        })
        .unwrap();
        assert_eq!(taken, (0..40).collect::<Vec<_>>());
        assert!(MOST.load(Ordering::SeqCst) <= 4, "{MOST:?}");
    }
}
