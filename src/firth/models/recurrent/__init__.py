"""LSTM stacks: AWD-LSTM (ULMFiT), ELMo, biLSTM, and the seq2seq encoder-decoder with attention."""
