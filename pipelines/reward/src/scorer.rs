//! Threads that score completions, in parallel with sampling and training.

use std::{
    any::Any,
    collections::VecDeque,
    io, mem,
    num::NonZeroUsize,
    panic::{self, AssertUnwindSafe},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use super::{
    Case, JointModel, Outcome, RewardSum,
    sum::{Board, lock},
};

/// Time that threads have to end when their pool is dropped.
const END_TIMEOUT: Duration = Duration::from_secs(2);

/// A pool of scoring threads, which ends when this is dropped. Jobs still in the queue are dropped too. A thread
/// whose reward hangs is left behind.
pub struct Scorer {
    pool: Arc<Pool>,
    threads: Vec<JoinHandle<()>>,
}

/// Completions whose outcomes are collected together, such as those of a step. Clones share the same state.
#[derive(Clone)]
pub struct Scoring {
    pool: Arc<Pool>,
    sheet: Arc<Sheet>,
}

struct Pool {
    reward: Arc<RewardSum>,
    queue: Mutex<Queue>,
    /// Signals a new job, or that the queue was closed.
    changed: Condvar,
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    is_closed: bool,
}

/// A case to score, with the destination of its outcome.
struct Job {
    sheet: Arc<Sheet>,
    number: usize,
    case: Case,
}

#[derive(Default)]
struct Sheet {
    board: Mutex<Board>,
    progress: Mutex<Progress>,
    /// Signals that no case is left to score.
    settled: Condvar,
}

#[derive(Default)]
struct Progress {
    /// Cases in flight.
    left: usize,
    /// A reward's panic, which the caller of `finish` resumes.
    panic: Option<Box<dyn Any + Send>>,
}

impl Scorer {
    /// Starts `workers` threads that score with `reward`.
    pub fn start(reward: Arc<RewardSum>, workers: NonZeroUsize) -> io::Result<Self> {
        let pool = Arc::new(Pool { reward, queue: Mutex::default(), changed: Condvar::new() });
        let mut scorer = Self { pool, threads: Vec::new() };
        for _ in 0..workers.get() {
            let pool = scorer.pool.clone();
            let thread = thread::Builder::new().name("scoring".into()).spawn(move || pool.work())?;
            scorer.threads.push(thread);
        }
        Ok(scorer)
    }

    /// Creates an empty collection of completions.
    pub fn begin(&self) -> Scoring {
        Scoring { pool: self.pool.clone(), sheet: Arc::default() }
    }
}

impl Drop for Scorer {
    fn drop(&mut self) {
        lock(&self.pool.queue).is_closed = true;
        self.pool.changed.notify_all();
        let deadline = Instant::now() + END_TIMEOUT;
        while self.threads.iter().any(|thread| !thread.is_finished()) && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(1));
        }
        for thread in self.threads.drain(..).filter(JoinHandle::is_finished) {
            // A worker catches the panics of rewards and has no others.
            let _ = thread.join();
        }
    }
}

impl Scoring {
    /// Queues a case after all cases queued before, in any collection. Each has a number from 0 on; numbers
    /// may be missing.
    pub fn hand_over(&self, number: usize, case: Case) {
        lock(&self.sheet.progress).left += 1;
        lock(&self.pool.queue).jobs.push_back(Job { sheet: self.sheet.clone(), number, case });
        self.pool.changed.notify_one();
    }

    /// Waits until all queued cases are scored, or `stop` has been set for `patience`. Returns true in the first case.
    pub fn wait(&self, stop: &AtomicBool, patience: Duration) -> bool {
        const LOOK_AGAIN: Duration = Duration::from_millis(50);
        let mut deadline = None;
        let mut progress = lock(&self.sheet.progress);
        while progress.left > 0 {
            if stop.load(Ordering::Relaxed) {
                let deadline = *deadline.get_or_insert_with(|| Instant::now() + patience);
                if Instant::now() >= deadline {
                    return false;
                }
            }
            let waited = self.sheet.settled.wait_timeout(progress, LOOK_AGAIN);
            progress = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    /// Waits for the outcomes of all queued cases and returns them ordered by number. Terms whose models the
    /// ranks hold together are scored on this thread by `models`. If there are any, every rank must call
    /// this.
    ///
    /// # Errors
    /// If a device or another rank fails. The failure of a completion is in its outcome.
    ///
    /// # Panics
    /// If a reward panicked.
    pub fn finish<M: JointModel>(self, models: &mut [M]) -> Result<Vec<Outcome>, M::Error> {
        let is_busy = |progress: &mut Progress| progress.left > 0;
        let progress = self.sheet.settled.wait_while(lock(&self.sheet.progress), is_busy);
        let panicked = progress.unwrap_or_else(PoisonError::into_inner).panic.take();
        if let Some(panicked) = panicked {
            panic::resume_unwind(panicked);
        }
        let board = mem::take(&mut *lock(&self.sheet.board));
        self.pool.reward.score_rest(board, models)
    }
}

impl Pool {
    fn work(&self) {
        while let Some(Job { sheet, number, case }) = self.next() {
            // A panic must not end the thread, or `finish` would wait forever.
            let score = AssertUnwindSafe(|| self.reward.score_on(&sheet.board, number, case));
            let panicked = panic::catch_unwind(score).err();
            let mut progress: MutexGuard<Progress> = lock(&sheet.progress);
            progress.left -= 1;
            progress.panic = progress.panic.take().or(panicked);
            if progress.left == 0 {
                sheet.settled.notify_all();
            }
        }
    }

    /// The next job; `None` once the queue is closed.
    fn next(&self) -> Option<Job> {
        let is_idle = |queue: &mut Queue| queue.jobs.is_empty() && !queue.is_closed;
        let queue = self.changed.wait_while(lock(&self.queue), is_idle);
        let mut queue = queue.unwrap_or_else(PoisonError::into_inner);
        if queue.is_closed { None } else { queue.jobs.pop_front() }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::convert::Infallible;
    use std::sync::mpsc;

    use super::super::{Completion, Error, Exact, Reward};
    use super::*;
    use anyroll_data::Record;

    pub enum NoModel {}

    /// No models that ranks hold.
    pub fn no_models() -> [NoModel; 0] {
        []
    }

    impl JointModel for NoModel {
        type Error = Infallible;

        fn score(&mut self, _: &[(&Record, Completion)]) -> Result<Vec<Result<f64, Error>>, Infallible> {
            match *self {}
        }
    }

    fn record(answer: &str) -> Record {
        Record { id: "1".into(), answer: answer.into(), ..Record::default() }
    }

    fn scorer(reward: Box<dyn Reward>, workers: usize) -> Scorer {
        Scorer::start(Arc::new(RewardSum::of(reward)), NonZeroUsize::new(workers).unwrap()).unwrap()
    }

    fn case(record: &Record, text: &str) -> Case {
        let (record, text) = (Arc::new(record.clone()), text.to_owned());
        Case { record, text, tokens: 8, finished: true, episode: None }
    }

    fn total(outcome: Outcome) -> f64 {
        match outcome {
            Outcome::Scored(score) => score.total,
            Outcome::Failed { error, .. } => panic!("{error}"),
        }
    }

    #[test]
    fn outcomes_are_in_the_order_of_the_cases() {
        let scorer = scorer(Box::new(Exact), 4);
        let records: Vec<Record> = (0..100).map(|n| record(&n.to_string())).collect();
        let [one, other] = [scorer.begin(), scorer.begin()];
        for (number, record) in records.iter().enumerate().rev() {
            // One in three is right in `one`; in the other all are.
            one.hand_over(number, case(record, &(number - number % 3).to_string()));
            other.hand_over(number, case(record, &record.answer));
        }
        let expected: Vec<f64> = (0..100).map(|number| f64::from(u8::from(number % 3 == 0))).collect();
        assert_eq!(
            one.finish(&mut no_models()).unwrap().into_iter().map(total).collect::<Vec<_>>(),
            expected
        );
        assert_eq!(
            other.finish(&mut no_models()).unwrap().into_iter().map(total).collect::<Vec<_>>(),
            [1.0; 100]
        );
    }

    /// Reports the start of each score, then waits for its value.
    struct Slow {
        begun: mpsc::Sender<String>,
        go_on: Mutex<mpsc::Receiver<Option<f64>>>,
    }

    impl Reward for Slow {
        fn name(&self) -> &'static str {
            "slow"
        }

        fn score(&self, record: &Record, _: &Completion) -> Result<f64, Error> {
            self.begun.send(record.id.clone()).unwrap();
            let told = lock(&self.go_on).recv().unwrap();
            Ok(told.expect("as it was told, this reward panics"))
        }
    }

    /// A slow reward, the receiver of starts, and the sender of values.
    fn slow() -> (Box<Slow>, mpsc::Receiver<String>, mpsc::Sender<Option<f64>>) {
        let (begun, begins) = mpsc::channel();
        let (tell, go_on) = mpsc::channel();
        (Box::new(Slow { begun, go_on: Mutex::new(go_on) }), begins, tell)
    }

    #[test]
    fn scoring_begins_when_a_case_comes_and_what_waits_is_given_up() {
        let (slow, begins, tell) = slow();
        let scorer = scorer(slow, 1);
        let scoring = scorer.begin();
        for number in 0..3 {
            scoring.hand_over(number, case(&Record { id: number.to_string(), ..record("") }, ""));
        }
        // Scoring starts before `finish`.
        assert_eq!(begins.recv().unwrap(), "0");
        let dropped = thread::spawn(move || drop(scorer));
        while !lock(&scoring.pool.queue).is_closed {
            thread::yield_now();
        }
        tell.send(Some(1.0)).unwrap();
        dropped.join().unwrap();
        assert_eq!(begins.try_recv().ok(), None, "it went on");
    }

    #[test]
    fn a_reward_that_hangs_is_not_waited_for_once_the_run_is_to_stop() {
        let (slow, begins, tell) = slow();
        let scorer = scorer(slow, 1);
        let scoring = scorer.begin();
        scoring.hand_over(0, case(&record(""), ""));
        begins.recv().unwrap();
        let stop = AtomicBool::new(true);
        let started = Instant::now();
        assert!(!scoring.wait(&stop, Duration::from_millis(200)));
        assert!(started.elapsed() >= Duration::from_millis(200));
        drop(scorer);
        assert!(started.elapsed() < 2 * END_TIMEOUT, "{:?}", started.elapsed());
        tell.send(Some(1.0)).unwrap();
        assert!(scoring.wait(&stop, Duration::from_secs(60)));
    }

    #[test]
    fn a_panic_of_a_reward_is_that_of_who_waits() {
        let (slow, begins, tell) = slow();
        let scorer = scorer(slow, 1);
        let scoring = scorer.begin();
        scoring.hand_over(0, case(&record(""), ""));
        tell.send(None).unwrap();
        let panicked = panic::catch_unwind(AssertUnwindSafe(|| scoring.finish(&mut no_models())));
        let message = *panicked.err().unwrap().downcast::<String>().unwrap();
        assert!(message.contains("this reward panics"), "{message}");
        // The thread continues with the next job.
        tell.send(Some(0.5)).unwrap();
        let scoring = scorer.begin();
        scoring.hand_over(0, case(&record(""), ""));
        assert_eq!(
            scoring.finish(&mut no_models()).unwrap().into_iter().map(total).collect::<Vec<_>>(),
            [0.5]
        );
        assert_eq!(begins.iter().take(2).count(), 2);
    }
}
