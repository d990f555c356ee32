"""What is made of the facts and of the trial: values go in and come out. No I/O."""
