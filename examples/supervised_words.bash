# Sourced by the examples whose first stage is supervised: it refuses keys that only RL reads.
supervised_words=()
for word in "$@"; do
  case "${word%%=*}" in
    algorithm* | rollout* | reward* | environment* | inference* | plan* | data.val_sets*) ;;
    dpo* | rm* | data.chosen_key | data.rejected_key | data.margin_key) ;;
    data.curriculum | data.mix.*.curriculum) ;;
    trainer.policy.optimizer.lr | trainer.policy.optimizer.scheduler | trainer.policy.optimizer.*_steps) ;;
    trainer.critic*) ;;
    trainer.*_batch_size | trainer.update_epochs | trainer.total_steps) ;;
    *) supervised_words+=("$word") ;;
  esac
done
