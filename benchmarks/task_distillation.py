"""Teacher, student alone and student distilled: score, parameters, latency and size.

    python benchmarks/task_distillation.py --teacher bert-base/ --student bert-small/ \
        --train sst2.train.jsonl --dev sst2.dev.jsonl --output-dir distillation

The teacher is fine-tuned first, with one seed. Then `firth finetune STUDENT --teacher ... --against alone` trains the
student twice, with and without the teacher, by the same number of steps. A checkpoint that is fine-tuned already is
taken as it is: --finetuned-teacher RUN/final.

The student alone sees each example more often, since both arms have the same steps: what is compared is the same
training time, not the same number of epochs.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import firth


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", help="checkpoint to fine-tune as the teacher")
    parser.add_argument("--finetuned-teacher", help="a teacher that is fine-tuned already")
    parser.add_argument("--student", required=True, help="checkpoint of the student")
    parser.add_argument("--train", required=True, help="labelled file, such as SST-2's train.tsv")
    parser.add_argument("--dev", required=True, help="labelled file for the scores")
    parser.add_argument("--task", default="classify")
    parser.add_argument("--unlabeled", default="", help="more text for the teacher to label")
    parser.add_argument("--augment", type=int, default=0, help="copies of each example with other words")
    parser.add_argument("--augment-model", default="", help="masked language model of the copies. Default: the student")
    parser.add_argument("--shots", type=int, default=0, help="labelled examples of the student; 0: all")
    parser.add_argument("--alpha", type=float, default=0.5)
    parser.add_argument("--temperature", type=float, default=2.0)
    parser.add_argument("--teacher-steps", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=1000, help="of each seed of the student")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--max-seq-length", type=int, default=128)
    parser.add_argument("--teacher-learning-rate", type=float, default=3e-5)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--output-dir", required=True)
    args = parser.parse_args()
    if not (args.teacher or args.finetuned_teacher):
        parser.error("give --teacher or --finetuned-teacher")
    out = Path(args.output_dir)
    shared = {
        "per_device_train_batch_size": args.batch_size,
        "max_seq_length": args.max_seq_length,
        "device": args.device,
    }
    files, seconds = (args.task, args.train, args.dev), {}
    teacher = args.finetuned_teacher
    if not teacher:
        began = time.monotonic()
        options = shared | {"max_steps": args.teacher_steps, "learning_rate": args.teacher_learning_rate, "seeds": 1}
        firth.finetune(args.teacher, *files, out / "teacher", **options)
        teacher, seconds["teacher"] = out / "teacher" / "final", round(time.monotonic() - began, 1)
    began = time.monotonic()
    options = shared | {"max_steps": args.steps, "learning_rate": args.learning_rate, "seeds": args.seeds}
    options |= {"shots": args.shots, "distill_alpha": args.alpha, "distill_temperature": args.temperature}
    options |= {"unlabeled": args.unlabeled, "augment": args.augment, "augment_model": args.augment_model}
    result = firth.finetune(args.student, *files, out / "student", teacher=str(teacher), against="alone", **options)
    seconds["students"] = round(time.monotonic() - began, 1)
    table = {"metric": result["metric"], "seconds": seconds, **result["distillation"]}
    print(json.dumps(table | {"comparison": result["comparison"]}, indent=1))


if __name__ == "__main__":
    main()
